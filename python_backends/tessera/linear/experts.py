"""One linear layer of every expert of a feed-forward layer, applied by grouped products."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from tessera.checkpoint.weights import Target, TensorError
from tessera.kernels.fp8_rows import E4M3
from tessera.kernels.operands import GroupedOperands, Routing
from tessera.linear.formats.fp8 import BLOCK
from tessera.linear.scheme import Linear, SchemeSelector, shaped, stacked


class Experts(Linear):
    """Those of ``experts`` experts, one below the other, of which a token sees ``picked``.

    Expert n is stored as the modules ``prefix``n.``parts``, of ``size`` output features each. Unquantized ones may be
    stored as one tensor instead, ``whole``: [experts, out, in], or, where ``either_way``, also [experts, in, out]; and
    so those in FP8, with the scales of their blocks in another one, which lies as the first does.
    """

    def __init__(
        self,
        in_features: int,
        prefix: str,
        parts: Sequence[str],
        whole: str,
        size: int,
        experts: int,
        picked: int,
        schemes: SchemeSelector,
        dtype: torch.dtype,
        device: torch.device,
        either_way: bool = False,
    ) -> None:
        names = [f"{prefix}{number}.{part}" for number in range(experts) for part in parts]
        super().__init__(in_features, stacked(names, [size] * len(names)), False, schemes, dtype, device)
        self.experts, self.picked, self.whole = experts, picked, f"{prefix}{whole}"
        self._either_way, self._wholes = either_way, dict[str, torch.Tensor]()

    @property
    def products_a_token(self) -> int:
        return super().products_a_token // self.experts * self.picked

    def operands(self, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        """What its grouped product takes for tokens x, or for the pairs of a ``routing``."""
        return self.scheme.grouped(self, x, routing)

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        wholes = {leaf: self._name_of(leaf) for leaf in self.scheme.leaves()}
        if all(name in stored for name in wholes.values()):
            return {name: partial(self._take_whole, leaf) for leaf, name in wholes.items()}
        return super().targets(stored)

    def split(self, wholes: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """What is stored as one tensor for each leaf -> each module's tensors. TensorError says what is wrong."""
        outputs, inputs = self.out_features // self.experts, self.in_features
        if self._either_way and inputs == outputs:
            raise TensorError(self.whole, f"is {inputs} x {outputs}: which of them the inputs are is not known")
        swapped = self._either_way and wholes["weight"].shape == (self.experts, inputs, outputs)
        found: dict[str, dict[str, torch.Tensor]] = {module: {} for module in self.sizes}
        for leaf, tensor in wholes.items():
            name, step = self._name_of(leaf), 1 if leaf == "weight" else BLOCK
            shape = self.experts, -(-outputs // step), -(-inputs // step)
            dtype = E4M3 if leaf == "weight" and len(wholes) > 1 else None
            rows = shaped({name: tensor.transpose(1, 2) if swapped else tensor}, name, shape, dtype).flatten(0, 1)
            size = max(self.sizes.values())
            if size < outputs and size % step:
                raise TensorError(name, f"has blocks of {step} rows, and a matrix of {size} ends within one")
            for tensors, part in zip(found.values(), rows.split(-(-size // step))):
                tensors[leaf] = part
        return found

    def _name_of(self, leaf: str) -> str:
        return self.whole + leaf.removeprefix("weight")

    def _take_whole(self, leaf: str, tensor: torch.Tensor) -> None:
        self._wholes[leaf] = tensor
        if len(self._wholes) == len(self.scheme.leaves()):
            for module, tensors in self.split(self._wholes).items():
                for each, part in tensors.items():
                    self._take(module, each, len(tensors), part)
            self._wholes.clear()
