"""Four bits a weight, in groups along the input: W = (codes - zeros) * scales."""

import logging
import sys
from typing import cast

import torch
import torch.nn.functional as F

from tessera.errors import CheckpointError
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows, quantize_weight
from tessera.kernels.operands import MAX_ROWS, GroupedOperands, Operand, Routing, rows_of
from tessera.kernels.tuning import layer_kernels
from tessera.kernels.w4_layout import PackedW4, chunk_of, pack, zeros_fit
from tessera.linear.scheme import (
    PRODUCTS,
    Linear,
    LinearScheme,
    LinearShape,
    Tensors,
    Ways,
    has_units,
    has_values,
    products_for,
    shaped,
)

_LOG = logging.getLogger(__name__)
ZERO = 8
"""Of symmetric groups."""
W4A16, DEQUANTIZED = "w4a16", "dequantized"
_CHECKED_ROWS = (1, 8, 13, 16, 29, 32, 57, 64)  # each compiled kernel, its tiles full and not
_MANY_TOKENS = 128  # of an expert in the mean, from which on a product of its dequantized weights is faster
_TILE = 64  # columns of the kernel's smallest tile
_TOLERANCE = 0.02  # of a tile's norm, or of the tiles' mean: both round to the model's dtype
_HOPPER = (9, 0)  # the compute capability that has the kernel's instructions, and the only one


class Int4(LinearScheme):
    """``codes`` uint8 [out, in], 0..15; ``scales`` and ``zeros`` float32 [out, in / group]; ``bias`` [out].

    ``group_size`` -1: a row is one group. Columns are in the checkpoint's order. Where groups are made of scattered
    columns, ``columns`` int64 [in] is the permutation that sorts them by group, else None.

    On a Hopper GPU finishing packs them for the W4A16 kernel (``packed``, ``words``, ``arrivals``), their columns
    sorted by group. For many rows it keeps an FP8 copy beside them (``weight``, ``scales``) while half of the card
    is free, else each product dequantizes all of W again. ``ways`` says which of them is the fastest up to how many
    rows. Elsewhere W is dequantized for good (``weight``). Experts keep no copy.
    """

    shared = frozenset({"columns"})

    def __init__(self, group_size: int) -> None:
        if type(group_size) is not int or not (group_size == -1 or group_size > 0):
            raise CheckpointError(f"quantization_config: group_size {group_size!r:.80} is no number of columns, nor -1")
        self.group_size = group_size
        self.ways: Ways = ((MAX_ROWS, W4A16),)
        self._trusted = True  # the kernel, on this device

    def leaves(self) -> set[str]:
        """GPTQ's and AWQ's names."""
        return {"qweight", "qzeros", "scales"}

    def groups(self, in_features: int) -> int:
        """How many groups a row has; CheckpointError if they do not divide it."""
        size = in_features if self.group_size == -1 else self.group_size
        if in_features % size:
            raise CheckpointError(f"groups of {size} do not divide {in_features} input features")
        return in_features // size

    def columns(self, tensors: Tensors, name: str, in_features: int, device: torch.device) -> torch.Tensor:
        """int64 [in]: what sorts the columns by the groups in tensor ``name``; in order if there is none."""
        order = torch.arange(in_features, device=device)
        if name not in tensors:
            return order
        groups = shaped(tensors, name, (in_features,), torch.int32)
        if not has_values(groups):
            return order
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

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, device=layer.device)
        grouped = weight.normal_(0, 0.02, generator=generator).unflatten(1, (layer.scales.shape[1], -1))
        scales = grouped.abs().amax(2) / 7
        layer.codes.copy_((grouped / scales[..., None]).round().add(ZERO).flatten(1))
        layer.scales.copy_(scales)
        layer.zeros.fill_(ZERO)

    def finish(self, layer: Linear) -> None:
        if layer.columns is not None and bool((layer.columns.diff() == 1).all()):  # in order
            layer.register_buffer("columns", None)
        weight: torch.Tensor | None = None
        packed: PackedW4 | None = None
        copy: tuple[torch.Tensor | None, ...] = (None, None)
        packs = self._packs(layer)
        if packs:
            codes = layer.codes if layer.columns is None else layer.codes[:, layer.columns]
            packed = pack(codes, layer.scales, layer.zeros)
        if not packs or (not layer.experts and has_units(layer) and _half_is_free(layer.device)):
            weight = dequantize(layer.codes, layer.scales, layer.zeros, layer.columns)
        if packs and weight is not None:
            copy = quantize_weight(weight)
        for name in ("codes", "scales", "zeros"):
            delattr(layer, name)
        if packed is None:
            assert weight is not None
            del layer.columns
            layer.register_buffer("weight", weight.to(layer.dtype))
            return
        for name, buffer in zip(("packed", "words", "arrivals", "weight", "scales"), (*packed, *copy)):
            layer.register_buffer(name, buffer)

    def _packs(self, layer: Linear) -> bool:
        """Whether the device has the kernel, and the kernel's layout holds these groups."""
        if layer.device.type != "cuda" or torch.cuda.get_device_capability(layer.device) != _HOPPER:
            return False
        group = layer.in_features // layer.scales.shape[1]
        return layer.dtype.itemsize == 2 and chunk_of(layer.in_features, group) is not None and zeros_fit(layer.zeros)

    def in_words(self, layer: Linear) -> str:
        return "int4 by row" if self.group_size == -1 else f"int4 in groups of {self.group_size}"

    def apply(self, layer: Linear, x: Operand) -> torch.Tensor:
        kernels, way = layer_kernels(layer.device.type), self.way(layer, rows_of(x))
        if way in PRODUCTS:
            return self.multiply(layer, x, way)
        if way == W4A16:
            return kernels.w4a16_linear(_sorted(layer, x), _packed(layer), layer.bias)
        assert isinstance(x, torch.Tensor)
        if not _is_packed(layer):
            return F.linear(x, layer.weight, layer.bias)
        return F.linear(_sorted(layer, x), kernels.widen_w4(_packed(layer), layer.dtype), layer.bias)

    def apply_gated(self, layer: Linear, x: Operand, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        if self.way(layer, rows_of(x)) != W4A16:
            return super().apply_gated(layer, x, fp8)
        gated = layer_kernels(layer.device.type).w4a16_gate_up(_sorted(layer, x), _packed(layer), layer.bias)
        return quantize_rows(gated) if fp8 else gated

    def grouped(self, layer: Linear, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        if not _is_packed(layer):
            return x, layer.weight
        pairs = len(x) * layer.picked if routing is None else len(routing.pairs)
        x, packed = _sorted(layer, x), _packed(layer)
        if pairs < _MANY_TOKENS * layer.experts or fixed():
            return x, packed
        return x, layer_kernels(layer.device.type).widen_w4(packed, layer.dtype)

    def possible(self, layer: Linear, shape: LinearShape, rows: int) -> list[str]:
        if not _is_packed(layer):
            return []
        copies = [] if layer.weight is None else products_for(layer, rows)
        return [*copies, *[W4A16] * (self._trusted and rows <= MAX_ROWS), DEQUANTIZED]

    def fixed_ways(self, layer: Linear, shape: LinearShape) -> Ways:
        return ((sys.maxsize, W4A16),) if self._trusted else ()

    def way(self, layer: Linear, rows: int) -> str:
        return super().way(layer, rows) if _is_packed(layer) else DEQUANTIZED

    def check(self, layer: Linear, shape: LinearShape) -> None:
        """Whether the kernel computes what the dequantized weights do.

        The kernel's language is an experimental part of triton, and no machine without a Hopper GPU can run it.
        """
        wrong = [rows for rows in _CHECKED_ROWS if not _agrees(layer, shape, rows)] if _is_packed(layer) else []
        if wrong:
            _LOG.error("the W4A16 kernel is wrong on this GPU for %s, %s rows, and is not used", shape, wrong)
        self._trusted = not wrong

    def beyond(self, layer: Linear) -> str:
        return DEQUANTIZED if layer.weight is None else "rows"


def _agrees(layer: Linear, shape: LinearShape, rows: int) -> bool:
    """Whether kernel and dequantized weights give the same in every tile, as the layer is used; changes its ways.

    Not in every value: of the 19,000 of one gated row some differ by 2 in 100 just from rounding.
    """
    scheme = cast("Int4", layer.scheme)
    x = torch.randn(rows, layer.in_features, dtype=layer.dtype, device=layer.device)
    answers = []
    for way in (W4A16, DEQUANTIZED):
        scheme.ways = ((rows, way),)
        try:
            answers.append(torch.as_tensor(layer.gated(x) if shape.place == "gate_up" else layer(x)).float())
        except Exception:  # also a kernel that does not compile is none
            _LOG.exception("%s fails for %s", way, shape)
            return False
    found, expected = answers
    errors, norms = (
        F.pad(values, (0, -values.shape[1] % _TILE)).unflatten(1, (-1, _TILE)).norm(dim=(0, 2))
        for values in (found - expected, expected)
    )
    return bool((errors <= _TOLERANCE * (norms + norms.mean())).all())


def _is_packed(layer: Linear) -> bool:
    return hasattr(layer, "packed")


def _packed(layer: Linear) -> PackedW4:
    return PackedW4(layer.packed, layer.words, layer.arrivals)


def _sorted(layer: Linear, x: Operand) -> torch.Tensor:
    """x with the columns in the order of the packed weights."""
    assert isinstance(x, torch.Tensor)
    return x.contiguous() if layer.columns is None else x[:, layer.columns]


def _half_is_free(device: torch.device) -> bool:
    """Whether half of the card is still free: what is left becomes cache, and leave that memory for the KV cache."""
    free, total = torch.cuda.mem_get_info(device)
    return 2 * free >= total


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """W, float32 [out, in], its columns in the checkpoint's order."""
    sorted_codes = codes if columns is None else codes[:, columns]
    grouped = sorted_codes.unflatten(1, (scales.shape[1], -1))
    weight = ((grouped - zeros[..., None]) * scales[..., None]).flatten(1)
    return weight if columns is None else weight[:, columns.argsort()]
