"""Plain weights in the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tessera.engine.kernels.selection import layer_kernels
from tessera.engine.quantization.scheme import Linear, LinearScheme, copy_whole


class Unquantized(LinearScheme):
    """``weight`` [out, in] and, where the layer has one, ``bias`` [out]; parts are ranges of rows."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        shape = (layer.out_features, layer.in_features)
        layer.register_buffer("weight", torch.empty(shape, dtype=dtype, device=device))
        bias = torch.empty(layer.out_features, dtype=dtype, device=device) if layer.has_bias else None
        layer.register_buffer("bias", bias)

    def tensor_names(self, layer: Linear) -> tuple[str, ...]:
        return ("weight", "bias") if layer.has_bias else ("weight",)

    def load(self, layer: Linear, part: str, name: str, tensor: torch.Tensor) -> None:
        copy_whole(layer.get_buffer(name)[layer.rows[part]], tensor)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.get_buffer("weight"), layer.bias
        if 0 < x.shape[0] <= layer.skinny_rows:
            return layer_kernels(x.device.type).skinny_linear(x, weight, bias)
        return F.linear(x, weight, bias)  # type: ignore[arg-type]

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if 0 < x.shape[0] <= layer.skinny_rows:
            return layer_kernels(x.device.type).skinny_gate_up(x, layer.get_buffer("weight"))
        return super().apply_gated(layer, x)
