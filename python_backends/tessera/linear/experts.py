"""One linear layer of every expert of a feed-forward layer, applied by grouped products."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from tessera.checkpoint.weights import Target, TensorError
from tessera.kernels.operands import GroupedOperands, Routing
from tessera.linear.scheme import Linear, SchemeSelector, shaped, stacked


class Experts(Linear):
    """Those of ``experts`` experts, one below the other, of which a token sees ``picked``.

    Expert n is stored as the modules ``prefix``n.``parts``, of ``size`` output features each. Unquantized ones may be
    stored as one tensor instead, ``whole``: [experts, out, in], or, where ``either_way``, also [experts, in, out].
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
        self._either_way = either_way

    @property
    def products_a_token(self) -> int:
        return super().products_a_token // self.experts * self.picked

    def operands(self, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        """What its grouped product takes for tokens x, or for the pairs of a ``routing``."""
        return self.scheme.grouped(self, x, routing)

    def targets(self, stored: Collection[str]) -> dict[str, Target]:
        if self.whole in stored and self.scheme.leaves() == {"weight"}:
            return {self.whole: self._take_whole}
        return super().targets(stored)

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored as ``whole`` -> each module's weight. TensorError says what is wrong with it."""
        outputs, inputs = self.out_features // self.experts, self.in_features
        if self._either_way and inputs == outputs:
            raise TensorError(self.whole, f"is {inputs} x {outputs}: which of them the inputs are is not known")
        if self._either_way and tensor.shape == (self.experts, inputs, outputs):
            tensor = tensor.transpose(1, 2)
        rows = shaped({self.whole: tensor}, self.whole, (self.experts, outputs, inputs)).flatten(0, 1)
        return dict(zip(self.sizes, rows.split(list(self.sizes.values()))))

    def _take_whole(self, tensor: torch.Tensor) -> None:
        for module, weight in self.split(tensor).items():
            self._take(module, "weight", 1, weight)
