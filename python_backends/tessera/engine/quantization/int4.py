"""Four bits a weight, in groups along the input: W = (codes - zeros) * scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tessera.engine.quantization.scheme import Linear, LinearScheme, shaped
from tessera.errors import CheckpointError
from tessera.fp8.rows import Fp8Rows

ZERO = 8
"""Of symmetric groups."""


class Int4(LinearScheme):
    """``codes`` uint8 [out, in], 0..15; ``scales`` and ``zeros`` float32 [out, in / group]; ``bias`` [out].

    ``group_size`` -1: a row is one group. Columns are in the checkpoint's order. Where groups are made of scattered
    columns, ``columns`` int64 [in] is the permutation that sorts them by group, else None.
    """

    shared = frozenset({"columns"})

    def __init__(self, group_size: int) -> None:
        if type(group_size) is not int or not (group_size == -1 or group_size > 0):
            raise CheckpointError(f"quantization_config: group_size {group_size!r:.80} is no number of columns, nor -1")
        self.group_size = group_size

    def groups(self, in_features: int) -> int:
        """How many groups a row has; CheckpointError if they do not divide it."""
        size = in_features if self.group_size == -1 else self.group_size
        if in_features % size:
            raise CheckpointError(f"groups of {size} do not divide {in_features} input features")
        return in_features // size

    def columns(
        self, tensors: Mapping[str, torch.Tensor], name: str, in_features: int, device: torch.device
    ) -> torch.Tensor:
        """int64 [in]: what sorts the columns by the groups in tensor ``name``; in order if there is none."""
        order = torch.arange(in_features, device=device)
        if name not in tensors:
            return order
        groups = shaped(tensors, name, (in_features,), torch.int32)
        columns = groups.argsort(stable=True)
        if not torch.equal(groups[columns], (order // (in_features // self.groups(in_features))).int()):
            raise CheckpointError(f"{name} does not make {self.groups(in_features)} groups of one size")
        return columns

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        rows, groups = layer.out_features, self.groups(layer.in_features)
        layer.register_buffer("codes", torch.zeros((rows, layer.in_features), dtype=torch.uint8, device=device))
        for name in ("scales", "zeros"):
            layer.register_buffer(name, torch.zeros((rows, groups), dtype=torch.float32, device=device))
        layer.register_buffer("columns", None)
        layer.register_buffer("bias", torch.zeros(rows, dtype=dtype, device=device) if layer.has_bias else None)

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, device=layer.device)
        grouped = weight.normal_(0, 0.02, generator=generator).unflatten(1, (layer.scales.shape[1], -1))
        scales = grouped.abs().amax(2) / 7
        layer.codes.copy_((grouped / scales[..., None]).round().add(ZERO).flatten(1))
        layer.scales.copy_(scales)
        layer.zeros.fill_(ZERO)
        if layer.has_bias:
            layer.bias.normal_(0, 0.02, generator=generator)

    def finish(self, layer: Linear) -> None:
        if layer.columns is not None and bool((layer.columns.diff() == 1).all()):  # in order
            layer.register_buffer("columns", None)
        weight = dequantize(layer.codes, layer.scales, layer.zeros, layer.columns).to(layer.dtype)
        for name in ("codes", "scales", "zeros", "columns"):
            delattr(layer, name)
        layer.register_buffer("weight", weight)

    def in_words(self, layer: Linear) -> str:
        return "int4 by row" if self.group_size == -1 else f"int4 in groups of {self.group_size}"

    def apply(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return F.linear(x, layer.weight, layer.bias)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """W, float32 [out, in], its columns in the checkpoint's order."""
    sorted_codes = codes if columns is None else codes[:, columns]
    grouped = sorted_codes.unflatten(1, (scales.shape[1], -1))
    weight = ((grouped - zeros[..., None]) * scales[..., None]).flatten(1)
    return weight if columns is None else weight[:, columns.argsort()]
