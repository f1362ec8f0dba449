"""Plain weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from tessera.kernels.deferred import Unfinished, finished
from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.tuning import layer_kernels
from tessera.linear.measured import InPlace, taking_turns
from tessera.linear.scheme import Linear, LinearScheme, LinearShape, Stored, plain_of

if TYPE_CHECKING:
    from tessera.kernels.tuning import MeasuredChoices

_FUSED_ROWS = (8192, 4096, 2048, 1024)  # where the fused product is measured, the largest first
_MARGIN = 0.01  # by which it must be faster: a tie is cuBLAS's
_LARGE = ((9, 0), (10, 0), (10, 3))  # compute capabilities with more than 180 KB of shared memory


class Unquantized(LinearScheme):
    """``weight`` [out, in] and, where the layer has one, ``bias`` [out].

    ``skinny_rows``: up to N rows a product for few rows is the fastest; ``fused_rows``: from N rows on, if any,
    one that ends in the gated activation. Only measuring tells.
    """

    def __init__(self) -> None:
        self.skinny_rows = 0
        self.fused_rows: int | None = None

    def stored(self, has_bias: bool) -> Stored:
        return Stored(frozenset({"weight", "bias"} if has_bias else {"weight"}))

    def decode(
        self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
    ) -> dict[str, torch.Tensor]:
        return {name: plain_of(tensors, name) for name in tensors}

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layer.out_features, layer.in_features)
        layer.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=device))
        bias = torch.zeros(layer.out_features, dtype=dtype, device=device) if layer.has_bias else None
        layer.register_buffer("bias", bias)

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        for buffer in layer.buffers():
            buffer.normal_(0, 0.02, generator=generator)

    def in_words(self, layer: Linear) -> str:
        return str(layer.dtype).removeprefix("torch.")

    def apply(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        return finished(self.apply_unfinished(layer, x))

    def apply_unfinished(self, layer: Linear, x: torch.Tensor | Fp8Rows) -> torch.Tensor | Unfinished:
        assert isinstance(x, torch.Tensor)
        weight, bias = layer.get_buffer("weight"), layer.bias
        if 0 < len(x) <= self.skinny_rows:
            return layer_kernels(x.device.type).skinny_unfinished(x, weight, bias)
        return F.linear(x, weight, bias)

    def apply_gated(self, layer: Linear, x: torch.Tensor | Fp8Rows, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        if isinstance(x, torch.Tensor) and not fp8:
            kernels, weight = layer_kernels(x.device.type), layer.get_buffer("weight")
            if 0 < len(x) <= self.skinny_rows:
                return kernels.skinny_gate_up(x, weight)
            if self.fused_rows is not None and len(x) >= self.fused_rows:
                return kernels.gate_up_silu(x, weight)
        return super().apply_gated(layer, x, fp8)

    def tune(self, layers: Sequence[Linear], shape: LinearShape, choices: MeasuredChoices, machine: str) -> None:
        """Finds the most rows up to which the skinny product wins, and the fewest from which on the fused one does,
        with their neighbours in the decoder layer."""
        from tessera.kernels.gate_up_silu import MULTIPLE
        from tessera.kernels.skinny_linear import K_MULTIPLE, MAX_ROWS

        gated = shape.place == "gate_up"
        if shape.dtype.itemsize != 2 or (gated and shape.bias):  # no kernel adds one before the activation
            return
        schemes = [cast("Unquantized", layer.scheme) for layer in layers]
        measured = list(zip(taking_turns(layers, shape), schemes))

        def run(place: InPlace, limits: tuple[int, int | None]) -> None:
            for layer, scheme in measured:
                scheme.skinny_rows, scheme.fused_rows = limits
                place.run(layer)

        def wins(rows: int, name: str, limits: tuple[int, int | None], margin: float = 0.0) -> bool:
            place = InPlace(shape, rows, layers[0].device)
            question = f"{shape}, {rows} rows, {shape.dtype}, {len(measured)} layers, {machine}"
            ways = {"cublas": partial(run, place, (0, None)), name: partial(run, place, limits)}
            return choices.fastest(question, ways, margin) == name

        few: tuple[int, ...] = ()
        many: tuple[int, ...] = ()
        if shape.inputs % K_MULTIPLE == 0:
            few = 16, 32, MAX_ROWS  # the kernel pads to these, so no other number needs an answer
        if gated and shape.inputs % MULTIPLE == 0 and shape.outputs % (2 * MULTIPLE) == 0 and _fits(layers[0].device):
            many = tuple(rows for rows in _FUSED_ROWS if rows <= shape.most_rows)
        skinny = list(takewhile(lambda rows: wins(rows, "skinny", (rows, None)), few))
        fused = list(takewhile(lambda rows: wins(rows, "fused", (0, rows), _MARGIN), many))
        for scheme in schemes:
            scheme.skinny_rows, scheme.fused_rows = max(skinny, default=0), min(fused, default=None)


def _fits(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that the fused product takes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _LARGE
