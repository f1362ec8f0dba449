"""A linear layer between the kernels that stand before and behind it in a decoder layer.

That is how its speed is measured: where weights or activations are quantized, part of a product's cost lies in its
neighbours. The one in front may have to quantize its output, the one behind to apply the product's scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.layers.norm import RmsNorm
from tessera.engine.quantization.scheme import Linear, LinearShape
from tessera.fp8.rows import Fp8Rows

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
            rotated = angles, angles, slots, cache, torch.empty_like(cache), shape.outputs // head - 2
            self._rotate = lambda qkv: layer_kernels(device.type).rotate_and_store(qkv, *rotated)

    @cached_property
    def _y(self) -> torch.Tensor:
        """For what is behind a layer. As large as gate_up's outputs, it is not there unless it is asked for."""
        return self._normal(self._rows, 0 if self._place == "alone" else self._shape.outputs)

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self._shape.dtype, device=self._device)

    def run(self, layer: Linear) -> object:
        """The kernel before the layer, the layer, and the kernel behind it."""
        fp8 = layer.takes_fp8(self._rows)
        x = self._before(fp8)
        if self._place == "gate_up":
            return layer.gated(x, fp8)
        if self._place in ("output", "down"):
            return self._norm(layer.unfinished(x), self._residual)
        if self._place == "qkv":
            return self._rotate(layer.unfinished(x))
        return layer(x)

    def without(self, fp8: bool) -> object:
        """What ``run`` would take without a layer: the kernel before it and the one behind it as beside plain weights.

        ``fp8``: still the activation behind gate_up quantizes, since that is for down.
        """
        self._before(False)
        if self._place == "gate_up":
            return self._activation(self._y, fp8)
        if self._place in ("output", "down"):
            return self._norm(self._y, self._residual)
        return self._rotate(self._y) if self._place == "qkv" else None

    def _before(self, fp8: bool) -> torch.Tensor | Fp8Rows:
        if self._place in ("qkv", "gate_up"):
            return self._norm(self._x, self._residual, fp8)[0]
        return self._activation(self._x, fp8) if self._place == "down" else self._x
