"""Which of a scheme's ways to compute a product is the fastest: that depends on the number of rows, and is measured on
a model's own weights and shapes before the first request.

A layer is measured between its neighbours in a decoder layer: where weights or activations are quantized, part of a
product's cost lies in them. The kernel before it may have to quantize its output, the one after it to apply the
product's scales.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tessera.kernels.fixed_rows import USUAL, fixed
from tessera.kernels.operands import Operand, PagedCache
from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds, layer_kernels, machine_of
from tessera.linear.scheme import Linear, LinearShape, Place, Ways
from tessera.linear.unquantized import CUBLAS, RmsNorm


def choose(layers: Sequence[Linear], shape: LinearShape, choices: MeasuredChoices, machine: str) -> None:
    """Finds the fastest way for each of some numbers of rows, with the layers' neighbours in the decoder layer; or
    takes the ways whose bits do not depend on these, and measures nothing.

    ``layers`` differ in nothing but their numbers: they have one shape, and hold the same buffers.
    """
    first, scheme = layers[0], layers[0].scheme
    measured = taking_turns(layers, shape)
    scheme.check(first, shape)
    if fixed():
        for layer in layers:
            layer.scheme.ways = scheme.fixed_ways(first, shape)
        return

    def run(place: InPlace, ways: Ways) -> None:
        for layer in measured:
            layer.scheme.ways = ways
            place.run(layer)

    found: list[tuple[int, str]] = []
    for rows in scheme.measured_rows:
        names = scheme.possible(first, shape, rows)
        if len(names) > 1:
            place = InPlace(shape, rows, first.device)
            question = (
                f"{scheme.in_words(first)} {shape} ({', '.join(first.held)}), {rows} rows, {shape.dtype}, "
                f"{len(measured)} layers, {machine}"
            )
            ways = {name: partial(run, place, ((rows, name),)) for name in names}
            names = [choices.fastest(question, ways, scheme.margin)]
        found += [(rows, name) for name in names]
    for layer in layers if found else ():
        layer.scheme.ways = tuple(found)


def tune(places: Mapping[Linear, Place], device: torch.device, most_rows: int) -> None:
    """Lets the schemes of a model's layers choose, on a GPU.

    ``most_rows``: of a step. The cache has left the memory of such a step free, and no layer takes more by itself.
    """
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    for shape, layers in layers_alike({layer: place for layer, place in places.items() if place != "experts"}):
        choose(layers, replace(shape, most_rows=most_rows), choices, machine_of(device))
        if fixed() and shape.place != "alone":
            _meet(layers[0], most_rows)


def _meet(layer: Linear, most_rows: int) -> None:
    """Has it found out for which numbers of rows the library has our bits; other numbers are made up of these."""
    x = torch.empty((most_rows, layer.in_features), dtype=layer.dtype, device=layer.device)
    for rows in range(USUAL, most_rows + 1, USUAL):
        if layer.scheme.way(layer, rows) == CUBLAS:
            layer(x[:rows])


def layers_alike(places: Mapping[Linear, Place]) -> list[tuple[LinearShape, list[Linear]]]:
    """The layers that have the same choices, which are of one shape, and hold the same kind of weights.

    Of one shape only some may be packed, have scattered columns, or still have found room for an FP8 copy.
    """
    groups: dict[tuple[LinearShape, str, tuple[str, ...]], list[Linear]] = defaultdict(list)
    for layer, place in places.items():
        shape = LinearShape(layer.out_features, layer.in_features, layer.has_bias, place, layer.dtype)
        groups[shape, layer.scheme.in_words(layer), layer.held].append(layer)
    return [(shape, layers) for (shape, *_), layers in groups.items()]


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
        self._place, normal = shape.place, self._normal
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
        x = self._before(fp8, layer.normalises(self._rows))
        if self._place == "gate_up":
            return layer.gated(x, fp8)
        if self._place in ("output", "down"):
            return self._norm(layer.deferred(x), self._residual)
        if self._place == "qkv":
            return self._rotate(layer.deferred(x))
        return layer(x)

    def _before(self, fp8: bool, later: bool) -> Operand:
        if self._place in ("qkv", "gate_up"):
            return self._norm(self._x, None, fp8, later)[0] if later else self._norm(self._x, self._residual, fp8)[0]
        return self._activation(self._x, fp8) if self._place == "down" else self._x
