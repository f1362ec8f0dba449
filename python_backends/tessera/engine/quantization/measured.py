"""Schemes with several ways to compute a product: which is the fastest depends on the number of rows, and is measured.

The ways in ``PRODUCTS`` multiply rows in e4m3 by weights in e4m3; a scheme may have others beside them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.kernels.unfinished import Unfinished
from tessera.engine.quantization.in_place import InPlace, taking_turns
from tessera.engine.quantization.scheme import Linear, LinearScheme, LinearShape
from tessera.fp8.rows import MULTIPLE, Fp8Rows, Fp8Sums, fp8_linear, fp8_sums, quantize_rows, rescale

if TYPE_CHECKING:
    from tessera.measured_choices import MeasuredChoices

#: the skinny product's limits (tessera.engine.kernels.skinny_fp8, which imports triton)
SKINNY_ROWS = 256
SKINNY_MULTIPLE = 128
_UNITS_FROM = (8, 9)  # the compute capability
_ROWS = (16, 32, 64, 96, 128, 256, 512, 1024)  # where the fastest way is measured
# Ways within this share of the fastest are as fast, since clocks and neighbours are others in a model: then cuBLAS.
_MARGIN = 0.03

#: ascending numbers of rows, and the way's name up to each
Ways = tuple[tuple[int, str], ...]
#: (x, weight, scales, bias, dtype) -> x W^T + b
Product = Callable[[Fp8Rows, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.dtype], torch.Tensor]


def _rescaled_product(
    x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return rescale(fp8_sums(x, weight, dtype), x.scales, scales, bias)


def _skinny_product(
    x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return layer_kernels(weight.device.type).skinny_fp8(x, weight, scales, bias, dtype)


PRODUCTS: dict[str, Product] = {"rescaled": _rescaled_product, "rows": fp8_linear, "skinny": _skinny_product}


class MeasuredScheme(LinearScheme):
    """``ways`` says which way is the fastest up to how many rows, and ``beyond`` which one for more and for none.

    For the ways in PRODUCTS a layer has ``weight`` e4m3 [out, in], ``scales`` float32 [out] and ``bias``.
    """

    ways: Ways

    @abstractmethod
    def possible(self, layer: Linear, rows: int) -> list[str]:
        """The ways to multiply this many rows, of equally fast ones the best first; none where there is no choice."""

    @abstractmethod
    def beyond(self, layer: Linear) -> str:
        """The way for any number of rows."""

    def way(self, layer: Linear, rows: int) -> str:
        """The fastest for this many rows."""
        for most, name in self.ways if rows else ():
            if rows <= most and (name != "skinny" or layer.in_features % SKINNY_MULTIPLE == 0):
                return name
        return self.beyond(layer)

    def takes_fp8(self, layer: Linear, rows: int) -> bool:
        return self.way(layer, rows) in PRODUCTS

    def quantized(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> Fp8Rows:
        return x if isinstance(x, Fp8Rows) else quantize_rows(x.contiguous())

    def multiply(self, layer: Linear, x: torch.Tensor | Fp8Rows, way: str) -> torch.Tensor:
        """One of PRODUCTS."""
        return PRODUCTS[way](self.quantized(layer, x), layer.weight, layer.scales, layer.bias, layer.dtype)

    def apply_unfinished(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> torch.Tensor | Unfinished:
        if not self._can_wait(layer, x):
            return self.apply(layer, x)
        rows = self.quantized(layer, x)
        return Fp8Sums(fp8_sums(rows, layer.weight, layer.dtype), rows.scales, layer.scales, layer.bias)

    def apply_gated(self, layer: Linear, x: torch.Tensor | Fp8Rows, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        if isinstance(x, Fp8Rows) and layer.bias is None and self._can_wait(layer, x):
            sums = fp8_sums(x, layer.weight, layer.dtype)
            return layer_kernels(sums.device.type).silu_and_multiply(sums, fp8, (x.scales, layer.scales))
        return super().apply_gated(layer, x, fp8)

    def _can_wait(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> bool:
        """Whether the product's scales are applied after it, and by whoever comes next."""
        return self.way(layer, rows_of(x)) == "rescaled"

    def tune(self, layers: Sequence[Linear], shape: LinearShape, choices: MeasuredChoices, machine: str) -> None:
        """Finds the fastest way for each of some numbers of rows, with its neighbours in the decoder layer."""
        schemes = [cast("MeasuredScheme", layer.scheme) for layer in layers]
        measured = list(zip(taking_turns(layers, shape), schemes))

        def run(place: InPlace, ways: Ways) -> None:
            for layer, scheme in measured:
                scheme.ways = ways
                place.run(layer)

        found: list[tuple[int, str]] = []
        for rows in _ROWS:
            names = self.possible(layers[0], rows)
            if not names:
                return
            place = InPlace(shape, rows, layers[0].device)
            question = (
                f"{self.in_words(layers[0])} {shape} ({', '.join(layers[0].held)}), {rows} rows, {shape.dtype}, "
                f"{len(measured)} layers, {machine}"
            )
            ways = {name: partial(run, place, ((rows, name),)) for name in names}
            found.append((rows, choices.fastest(question, ways, _MARGIN)))
        for scheme in schemes:
            scheme.ways = tuple(found)


def products_for(layer: Linear, rows: int) -> list[str]:
    """Those of PRODUCTS that take this many rows."""
    skinny = rows <= SKINNY_ROWS and layer.in_features % SKINNY_MULTIPLE == 0
    return [name for name in PRODUCTS if name != "skinny" or skinny]


def rows_of(x: torch.Tensor | Fp8Rows) -> int:
    return len(x.values if isinstance(x, Fp8Rows) else x)


def has_units(layer: Linear) -> bool:
    """Whether the device multiplies e4m3 rows by weights of this shape."""
    if layer.device.type != "cuda" or layer.dtype != torch.bfloat16:
        return False
    from tessera.fp8.kernels import MAX_SIZE

    whole = layer.out_features % MULTIPLE == 0 and layer.in_features % MULTIPLE == 0
    return whole and layer.in_features <= MAX_SIZE and torch.cuda.get_device_capability(layer.device) >= _UNITS_FROM
