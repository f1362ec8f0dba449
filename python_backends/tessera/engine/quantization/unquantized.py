"""Plain weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from tessera.checkpoint.weights import plain
from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.quantization.in_place import taking_turns
from tessera.engine.quantization.scheme import Linear, LinearScheme, LinearShape, Stored
from tessera.fp8.rows import Fp8Rows

if TYPE_CHECKING:
    from tessera.measured_choices import MeasuredChoices


class Unquantized(LinearScheme):
    """``weight`` [out, in] and, where the layer has one, ``bias`` [out].

    ``skinny_rows``: up to so many rows a product for few rows is the fastest, which only measuring tells.
    """

    def __init__(self) -> None:
        self.skinny_rows = 0

    def stored(self, has_bias: bool) -> Stored:
        return Stored(frozenset({"weight", "bias"} if has_bias else {"weight"}))

    def decode(
        self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
    ) -> dict[str, torch.Tensor]:
        return {name: plain(tensor) for name, tensor in tensors.items()}

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
        assert isinstance(x, torch.Tensor)
        weight, bias = layer.get_buffer("weight"), layer.bias
        if 0 < x.shape[0] <= self.skinny_rows:
            return layer_kernels(x.device.type).skinny_linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def apply_gated(self, layer: Linear, x: torch.Tensor | Fp8Rows, fp8: bool = False) -> torch.Tensor | Fp8Rows:
        if isinstance(x, torch.Tensor) and 0 < x.shape[0] <= self.skinny_rows and not fp8:
            return layer_kernels(x.device.type).skinny_gate_up(x, layer.get_buffer("weight"))
        return super().apply_gated(layer, x, fp8)

    def tune(self, layers: Sequence[Linear], shape: LinearShape, choices: MeasuredChoices, machine: str) -> None:
        """Finds the most rows up to which the skinny product wins; there it begins, at zero."""
        from tessera.engine.kernels.skinny_linear import K_MULTIPLE, MAX_ROWS

        gated = shape.place == "gate_up"
        # The kernel's own limits; it has no bias where it ends in the activation.
        if shape.dtype.itemsize != 2 or shape.inputs % K_MULTIPLE or (gated and shape.bias):
            return
        schemes = [cast("Unquantized", layer.scheme) for layer in layers]
        measured = list(zip(taking_turns(layers, shape), schemes))

        def run(x: torch.Tensor, skinny_rows: int) -> None:
            for layer, scheme in measured:
                scheme.skinny_rows = skinny_rows
                layer.gated(x) if gated else layer(x)

        best = 0
        for rows in (16, 32, MAX_ROWS):  # the kernel pads to these, so no other number needs an answer
            x = torch.randn(rows, shape.inputs, dtype=shape.dtype, device=layers[0].device)
            question = f"{shape}, {rows} rows, {shape.dtype}, {len(measured)} layers, {machine}"
            ways = {"cublas": partial(run, x, 0), "skinny": partial(run, x, rows)}
            if choices.fastest(question, ways) != "skinny":
                break
            best = rows
        for scheme in schemes:
            scheme.skinny_rows = best
