"""One linear layer of every expert of a feed-forward layer, applied by grouped products."""

from collections.abc import Collection, Sequence
from functools import partial

import torch

from tessera.checkpoint.config import ExpertsConfig
from tessera.checkpoint.weights import Target, TensorError
from tessera.kernels.fp8_rows import E4M3
from tessera.kernels.operands import GroupedOperands, Routing
from tessera.linear.formats.fp8 import BLOCK
from tessera.linear.scheme import Linear, SchemeSelector, Tensors, shaped, stacked


class Experts(Linear):
    """Those of all experts, one below the other, of which a token sees ``picked``.

    ``kind``: gate_up or down. Expert n is stored as the modules ``prefix``n.gate_proj and so on. Unquantized ones may
    be stored as one tensor instead, ``whole``: [experts, out, in], or, where ``either_way``, also [experts, in, out];
    and so those in FP8, with the scales of their blocks in another one, which lies as the first does.
    """

    def __init__(
        self,
        prefix: str,
        kind: str,
        hidden: int,
        config: ExpertsConfig,
        schemes: SchemeSelector,
        dtype: torch.dtype,
        device: torch.device,
        either_way: bool = False,
    ) -> None:
        names = [f"{prefix}{number}.{part}_proj" for number in range(config.num_experts) for part in kind.split("_")]
        inputs, size = hidden, config.moe_intermediate_size
        if kind == "down":
            inputs, size = size, inputs
        super().__init__(inputs, stacked(names, [size] * len(names)), False, schemes, dtype, device)
        self.experts, self.picked, self.whole = config.num_experts, config.num_experts_per_tok, f"{prefix}{kind}_proj"
        self._either_way, self._wholes = either_way, dict[str, torch.Tensor]()

    @property
    def products_a_token(self) -> int:
        return super().products_a_token // self.experts * self.picked

    def operands(self, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        """What its grouped product takes for tokens x, or for the pairs of a ``routing``."""
        return self.scheme.grouped(self, x, routing)

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        wholes = {self._name_of(leaf): leaf for leaf in self.scheme.leaves()}
        if all(name in stored for name in wholes):
            return {name: partial(self._take_whole, leaf) for name, leaf in wholes.items()}
        return super().targets(stored)

    def split(self, wholes: Tensors) -> dict[str, torch.Tensor]:
        """What is stored as one tensor for each leaf -> the modules' tensors. TensorError says what is wrong."""
        outputs, inputs = self.out_features // self.experts, self.in_features
        if self._either_way and inputs == outputs:
            raise TensorError(self.whole, f"is {inputs} x {outputs}: which of them the inputs are is not known")
        swapped = self._either_way and wholes["weight"].shape == (self.experts, inputs, outputs)
        size, parts = max(self.sizes.values()), dict[str, Sequence[torch.Tensor]]()
        for leaf, tensor in wholes.items():
            name, step = self._name_of(leaf), 1 if leaf == "weight" else BLOCK
            shape = self.experts, -(-outputs // step), -(-inputs // step)
            dtype = E4M3 if leaf == "weight" and len(wholes) > 1 else None
            rows = shaped({name: tensor.transpose(1, 2) if swapped else tensor}, name, shape, dtype)
            if size < outputs and size % step:
                raise TensorError(name, f"has blocks of {step} rows, and a matrix of {size} ends within one")
            parts[leaf] = rows.flatten(0, 1).split(-(-size // step))
        return {f"{name}.{leaf}": parts[leaf][number] for number, name in enumerate(self.sizes) for leaf in parts}

    def _name_of(self, leaf: str) -> str:
        return self.whole + leaf.removeprefix("weight")

    def _take_whole(self, leaf: str, tensor: torch.Tensor) -> None:
        self._wholes[leaf] = tensor
        if len(self._wholes) == len(self.scheme.leaves()):
            targets = super().targets(())
            for name, part in self.split(self._wholes).items():
                targets[name](part)
            self._wholes.clear()
