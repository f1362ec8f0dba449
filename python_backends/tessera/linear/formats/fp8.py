"""FP8 (e4m3) weights and activations: W = weight * scales; x is quantized in front of the product.

FP8 checkpoints other than compressed-tensors': scales of 128 x 128 blocks, and ModelOpt's.
"""

from functools import partial

import torch
import torch.nn.functional as F

from tessera.checkpoint.weights import TensorError
from tessera.kernels.fp8_rows import E4M3, Fp8Rows, quantize_rows, quantize_weight
from tessera.kernels.operands import DeferredProduct, GroupedOperands, NormedRows, Operand, Routing, rows_of
from tessera.linear.formats import Groups, Settings
from tessera.linear.scheme import (
    Linear,
    LinearScheme,
    LinearShape,
    Tensors,
    Ways,
    has_units,
    plain_of,
    products_for,
    shaped,
)

BLOCK = 128


class Fp8(LinearScheme):
    """``weight`` e4m3 [out, in]; ``scales`` float32 [out], or [out, in / 128] of ``blocks``; ``bias`` [out].

    Activations are quantized with ``input_scale``, a float32 scalar, if ``static``; else by token, and with ``blocks``
    by token and 128 columns. ``scale_name``: what the checkpoint calls the weight's scale. One scale may stand for the
    whole stored module.

    On a GPU with FP8 units the weight stays as it is, and ``ways`` says which product is the fastest for how many rows.
    Elsewhere, and with ``blocks``, finishing dequantizes it.
    """

    def __init__(self, scale_name: str = "weight_scale", static: bool = False, blocks: bool = False) -> None:
        self.scale_name, self.static, self.blocks = scale_name, static, blocks
        self.ways: Ways = ((32, "skinny"), (256, "rescaled"))

    def leaves(self) -> set[str]:
        return {"weight", self.scale_name} | ({"input_scale"} if self.static else set())

    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        decoded = {"weight": shaped(tensors, "weight", (out_features, in_features), E4M3)}
        scale = tensors[self.scale_name].float()
        if self.blocks:
            shaped(tensors, self.scale_name, (-(-out_features // BLOCK), -(-in_features // BLOCK)))
            decoded["scales"] = scale.repeat_interleave(BLOCK, 0)[:out_features]
        elif scale.numel() in (1, out_features):
            decoded["scales"] = scale.flatten().expand(out_features)
        else:
            raise TensorError(self.scale_name, f"has shape {list(scale.shape)}, expected one scale, or one a row")
        if self.static:
            if tensors["input_scale"].numel() != 1:
                raise TensorError("input_scale", f"has shape {list(tensors['input_scale'].shape)}, expected one value")
            decoded["input_scale"] = tensors["input_scale"].float().reshape(1).expand(out_features)
        return decoded

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        rows, columns = layer.out_features, layer.in_features
        layer.register_buffer("weight", torch.zeros((rows, columns), dtype=E4M3, device=device))
        shape = (rows, -(-columns // BLOCK)) if self.blocks else (rows,)
        layer.register_buffer("scales", torch.zeros(shape, device=device))
        layer.register_buffer("input_scale", torch.zeros(rows, device=device) if self.static else None)

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        weight = torch.empty(layer.weight.shape, device=layer.device).normal_(0, 0.02, generator=generator)
        values, scales = quantize_weight(weight)
        layer.weight.copy_(values)
        layer.scales.copy_(scales[:, None].expand_as(layer.scales) if self.blocks else scales)
        if self.static:
            layer.input_scale.fill_(16 / 448)

    def finish(self, layer: Linear) -> None:
        if self.static:
            # Modules with the same input have the same scale if they were calibrated together; else none may clip.
            layer.input_scale = layer.input_scale.max()
        if not self._has_units(layer):
            weight = dequantize(layer.weight, layer.scales)
            layer.weight = weight if layer.device.type == "cpu" else weight.to(layer.dtype)
            layer.register_buffer("scales", None)

    def _has_units(self, layer: Linear) -> bool:
        return not self.blocks and has_units(layer)  # scales of blocks meet none of the products

    def wants_fp8_input(self, layer: Linear, rows: int) -> bool:
        return layer.scales is not None and not self.static

    def possible(self, layer: Linear, shape: LinearShape, rows: int) -> list[str]:
        return [] if layer.scales is None else products_for(layer, rows)

    def beyond(self, layer: Linear) -> str:
        return "rows"

    def in_words(self, layer: Linear) -> str:
        return "fp8 in blocks" if self.blocks else "fp8"

    def apply(self, layer: Linear, x: Operand) -> torch.Tensor:
        """Of dequantized weights in the model's dtype; on the CPU in float32, with x rounded as the product in FP8 sees
        it."""
        if layer.scales is not None:
            return self.multiply(layer, x, self.way(layer, rows_of(x)))
        assert not isinstance(x, NormedRows)
        if layer.device.type != "cpu":
            assert isinstance(x, torch.Tensor)
            return F.linear(x, layer.weight, layer.bias)
        wide = x.dequantized() if isinstance(x, Fp8Rows) else self._rounded(layer, x)
        bias = None if layer.bias is None else layer.bias.float()
        return F.linear(wide, layer.weight, bias).to(layer.dtype)

    def apply_deferred(self, layer: Linear, x: Operand) -> torch.Tensor | DeferredProduct:
        return self.apply(layer, x) if layer.scales is None else super().apply_deferred(layer, x)

    def quantized(self, layer: Linear, x: Operand) -> Fp8Rows:
        assert not isinstance(x, NormedRows)
        return x if isinstance(x, Fp8Rows) else quantize_rows(x.contiguous(), layer.input_scale)

    def grouped(self, layer: Linear, x: torch.Tensor, routing: Routing | None = None) -> GroupedOperands:
        if layer.scales is not None:
            return self.quantized(layer, x), Fp8Rows(layer.weight, layer.scales[:, None])
        return self._rounded(layer, x) if layer.device.type == "cpu" else x, layer.weight

    def _rounded(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x as the product in FP8 sees it, in float32."""
        if not self.blocks:
            return quantize_rows(x, layer.input_scale).dequantized()
        padded = F.pad(x, (0, -x.shape[1] % BLOCK))
        return quantize_rows(padded.reshape(-1, BLOCK)).dequantized().view_as(padded)[:, : x.shape[1]]


class Fp8OnLoad(Fp8):
    """The same from an unquantized checkpoint: each output channel is quantized as it is read."""

    def leaves(self) -> set[str]:
        return {"weight"}

    def decode(self, tensors: Tensors, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        weight, scales = quantize_weight(plain_of(tensors, "weight"))
        return {"weight": weight, "scales": scales}


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """W, float32 [out, in]."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    return weight.float() * scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]


def read_blocks(settings: Settings) -> Groups:
    """quant_method "fp8": the weight is multiplied by ``weight_scale_inv`` [out / 128, in / 128], despite its name."""
    settings.take("weight_block_size", ([BLOCK, BLOCK],))
    settings.take("activation_scheme", ("dynamic",), "dynamic")
    settings.take("fmt", ("e4m3",), "e4m3")
    settings.take("dequantize", (False,), False)
    return [(["Linear"], partial(Fp8, "weight_scale_inv", blocks=True))]


def read_modelopt(settings: Settings) -> Groups:
    """quant_method "modelopt": one ``weight_scale`` and one ``input_scale`` a module."""
    settings.take("quant_algo", ("FP8",))
    settings.take("kv_cache_quant_algo", (None,))
    settings.take("kv_cache_scheme", (None,))
    settings.drop("producer", "config_groups", "quant_method", "version")  # the groups say the same at length
    return [(["Linear"], partial(Fp8, static=True))]
