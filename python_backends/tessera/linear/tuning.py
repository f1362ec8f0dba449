"""Schemes with several ways to compute a product: which is the fastest depends on the number of rows, and is measured
on a model's own weights and shapes before the first request.

The ways in ``PRODUCTS`` multiply rows in e4m3 by weights in e4m3; a scheme may have others beside them.

A layer is measured between its neighbours in a decoder layer: where weights or activations are quantized, part of a
product's cost lies in them. The kernel before it may have to quantize its output, the one after it to apply the
product's scales.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from tessera import kernels
from tessera.kernels.fp8_rows import MULTIPLE, Fp8Rows, Fp8Sums, fp8_linear, fp8_sums, quantize_rows, rescale
from tessera.kernels.operands import PagedCache, Unfinished
from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds, layer_kernels
from tessera.linear.layers import RmsNorm
from tessera.linear.scheme import Linear, LinearScheme, LinearShape, Place

#: the skinny product's limits (tessera.kernels.skinny_linear, which imports triton)
SKINNY_ROWS = 256
SKINNY_MULTIPLE = 128
_UNITS_FROM = (8, 9)  # the compute capability

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

    ways: Ways = ()
    #: the numbers of rows that the fastest way is measured for
    measured_rows: Sequence[int] = (16, 32, 64, 96, 128, 256, 512, 1024)
    #: ways within this share of the fastest are as fast, since clocks and neighbours are others in a model: then cuBLAS
    margin = 0.03

    @abstractmethod
    def possible(self, layer: Linear, shape: LinearShape, rows: int) -> list[str]:
        """The ways to multiply this many rows, of equally fast ones the best first; none where none is looked for."""

    @abstractmethod
    def beyond(self, layer: Linear) -> str:
        """The way for any number of rows."""

    def way(self, layer: Linear, rows: int) -> str:
        """The fastest for this many rows."""
        for most, name in self.ways if rows else ():
            if rows <= most and (name != "skinny" or layer.in_features % SKINNY_MULTIPLE == 0):
                return name
        return self.beyond(layer)

    def wants_fp8_input(self, layer: Linear, rows: int) -> bool:
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
        """Whether the product's scales are applied after it, by what comes next."""
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
        for rows in self.measured_rows:
            names = self.possible(layers[0], shape, rows)
            if len(names) > 1:
                place = InPlace(shape, rows, layers[0].device)
                question = (
                    f"{self.in_words(layers[0])} {shape} ({', '.join(layers[0].held)}), {rows} rows, {shape.dtype}, "
                    f"{len(measured)} layers, {machine}"
                )
                ways = {name: partial(run, place, ((rows, name),)) for name in names}
                names = [choices.fastest(question, ways, self.margin)]
            found += [(rows, name) for name in names]
        for scheme in schemes if found else ():
            scheme.ways = tuple(found)


def tune(places: Mapping[Linear, Place], device: torch.device, most_rows: int) -> None:
    """Lets the schemes of a model's layers choose, on a GPU.

    ``most_rows``: of a step. The cache has left the memory of such a step free, and no layer takes more by itself.
    """
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    machine = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, kernels {kernels_version()}"
    for shape, layers in layers_alike(places):
        layers[0].scheme.tune(layers, replace(shape, most_rows=most_rows), choices, machine)


def kernels_version() -> str:
    """Eight digits that change with the text of our kernels, and of how they are measured."""
    files = [*sorted(Path(str(kernels.__file__)).parent.glob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def layers_alike(places: Mapping[Linear, Place]) -> list[tuple[LinearShape, list[Linear]]]:
    """The layers that have the same choices, which are of one shape, and hold the same kind of weights.

    Of one shape only some may be packed, have scattered columns, or still have found room for an FP8 copy.
    """
    groups: dict[tuple[LinearShape, str, tuple[str, ...]], list[Linear]] = defaultdict(list)
    for layer, place in places.items():
        shape = LinearShape(layer.out_features, layer.in_features, layer.has_bias, place, layer.dtype)
        groups[shape, layer.scheme.in_words(layer), layer.held].append(layer)
    return [(shape, layers) for (shape, *_), layers in groups.items()]


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
    from tessera.kernels.fp8 import MAX_SIZE

    whole = layer.out_features % MULTIPLE == 0 and layer.in_features % MULTIPLE == 0
    return whole and layer.in_features <= MAX_SIZE and torch.cuda.get_device_capability(layer.device) >= _UNITS_FROM


_MOST_OF_A_HEAD = 128
_WEIGHTS_IN_TURN = 1 << 29


def taking_turns(layers: Sequence[Linear], shape: LinearShape) -> Sequence[Linear]:
    """Those of the layers of one shape that are measured one after the other, the first ones.

    In 4 bits they have up to 256 MB of weights together, so that each finds few of its own in the GPU's cache, as in a
    step. Eight small layers would find half of them there, and so another way the fastest.
    """
    return layers[: max(1, _WEIGHTS_IN_TURN // (shape.outputs * shape.inputs))]


class InPlace:
    """Random activations of this many ``rows`` for layers of one shape, and what ``DecoderLayer.forward`` does to them.

    Before qkv and gate_up stands a norm, before down the gated activation; each quantizes for a layer that wants it.
    Before output stands the attention, which cannot: the layer quantizes for itself. Behind output and down stands a
    norm, behind gate_up the activation, which quantizes for a down that is as the gate_up, and behind qkv the rotation,
    here of heads as large as the shape allows, one of which is the keys'.
    """

    def __init__(self, shape: LinearShape, rows: int, device: torch.device) -> None:
        self._shape, self._rows, self._device = shape, rows, device
        self._place = shape.place
        normal = self._normal

        hidden = shape.outputs if shape.place in ("output", "down") else shape.inputs
        self._residual = normal(rows, hidden)
        self._x = normal(rows, 2 * shape.inputs if shape.place == "down" else shape.inputs)
        self._norm = RmsNorm(hidden, 1e-6, shape.dtype, device)
        self._norm.get_buffer("weight").fill_(1)
        self._activation = layer_kernels(device.type).silu_and_multiply
        if shape.place == "qkv":
            head = math.gcd(shape.outputs, _MOST_OF_A_HEAD)
            while shape.outputs < 3 * head:
                head //= 2
            angles = torch.zeros((rows, head // 2), dtype=torch.float32, device=device)
            slots = torch.arange(rows, device=device)
            cache = normal(rows, 1, 1, head)
            rotated = angles, angles, slots, PagedCache(cache, torch.empty_like(cache)), shape.outputs // head - 2
            self._rotate = lambda qkv: layer_kernels(device.type).rotate_and_store(qkv, *rotated)

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self._shape.dtype, device=self._device)

    def run(self, layer: Linear) -> object:
        """The kernel before the layer, the layer, and the kernel behind it."""
        fp8 = layer.wants_fp8_input(self._rows)
        x = self._before(fp8)
        if self._place == "gate_up":
            return layer.gated(x, fp8)
        if self._place in ("output", "down"):
            return self._norm(layer.unfinished(x), self._residual)
        if self._place == "qkv":
            return self._rotate(layer.unfinished(x))
        return layer(x)

    def _before(self, fp8: bool) -> torch.Tensor | Fp8Rows:
        if self._place in ("qkv", "gate_up"):
            return self._norm(self._x, self._residual, fp8)[0]
        return self._activation(self._x, fp8) if self._place == "down" else self._x
