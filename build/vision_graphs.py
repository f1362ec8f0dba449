"""InternViT as an ONNX graph for TensorRT: "TILES" -> bfloat16 "EMBEDDINGS", as the stages name them.

The graph of the CPU vision stage (tessera.models.internvl.onnx_graph) in standard operators (opset 17), for a
strongly typed network: the types stand in the graph. Matrix products take narrow operands (float16, bfloat16, or
quantised ones) and all between them is float32: residual stream, norms, softmax, activations, biases. The rows in
float32 are a tensor named ``embeddings`` here too, each layer's output is one named ``layers.N``.
"""

from __future__ import annotations

import numpy as np
import onnx
import torch
from calibration import KINDS, Quantization, quantized_layers
from onnx import TensorProto, helper

from tessera.models.internvl.onnx_graph import GraphWriter
from tessera.models.internvl.vision import Attention, InternViT

PRECISIONS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_OPSET_FP8 = 19  # the first whose QuantizeLinear knows float8
# Pixels are scaled into 0..1 by a power of two, which rounds nothing: the patch embedding's weights, which hold the
# division by 255, would else be subnormal numbers in float16.
_PIXEL_SCALE = 256.0
_LEAST = 1e-12  # the magnitude that a tensor of zeros counts as, so that no scale is 0


def tensorrt_graph(
    tower: InternViT, fingerprint: str = "", precision: str = "float16", quantization: Quantization | None = None
) -> onnx.ModelProto:
    """Write the graph of a float32 tower; see ``intern_vit_graph.vision_graph``.

    ``precision`` is the type of the matrix products' operands (of PRECISIONS), and ``quantization`` gives the layers'
    linear maps explicit Q/DQ nodes instead (attention and projector keep ``precision``).
    """
    writer = TypedWriter(tower, PRECISIONS[precision], quantization)
    return writer.model(fingerprint, f"{quantization.kind} and {precision}" if quantization else precision)


class TypedWriter(GraphWriter):
    """Standard operators; narrow operands for matrix products, float32 for all else."""

    tiles, rows, rows_type = "TILES", "EMBEDDINGS", TensorProto.BFLOAT16
    domains = ()
    fuses_bias = False

    def __init__(self, tower: InternViT, narrow: int, quantization: Quantization | None) -> None:
        super().__init__(tower)
        self.narrow_type = narrow
        self.quantized: dict[str, str] = {}  # a tensor -> itself after its Q and DQ, shared by q, k and v
        self.amax: dict[torch.nn.Module, float] = {}
        if quantization:
            self.quantized_type, self.largest = KINDS[quantization.kind]
            layers = quantized_layers(tower)
            self.amax = {layer: quantization.amax[name] for name, layer in layers.items()}
            self.opset = _OPSET_FP8 if quantization.kind == "fp8" else self.opset

    def attend(self, parts: list[str], attention: Attention) -> str:
        size = self.width // attention.heads
        query, key, value = (
            self.add("Transpose", self.reshape(y, -1, self.tokens, attention.heads, size), perm=perm)
            for y, perm in zip(parts, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
        )
        query = self.times(query, size**-0.5)
        rows = self.product(self.add("Softmax", self.product(query, key), axis=-1), value)
        return self.reshape(self.add("Transpose", rows, perm=(0, 2, 1, 3)), -1, self.tokens, self.width)

    def gelu(self, x: str) -> str:
        return self.gelu_of(x, self.add("Erf", self.times(x, 2**-0.5)))

    def finish(self, rows: str) -> None:
        self.add("Cast", rows, to=self.rows_type, out=self.rows)

    def pixels(self, tiles: str) -> str:
        # TensorRT knows uint8 at its inputs only, so the type changes before the shape does. 0..255 fit exactly.
        narrow = self.narrow(tiles)
        return self.add("Mul", narrow, self.narrow_constant(torch.tensor(1 / _PIXEL_SCALE)))

    def embed_patches(self, patches: str) -> str:
        linear = self.tower.patch_embedding
        x = self.add("MatMul", patches, self.narrow_constant(linear.weight.t() * _PIXEL_SCALE))
        return self.add("Add", self.wide(x), self.constant(linear.bias))

    def matrix(self, x: str, weight: torch.Tensor, layer: torch.nn.Linear) -> str:
        if layer in self.amax:
            return self.add("MatMul", self.quantized_input(x, self.amax[layer]), self.quantized_weight(weight))
        return self.wide(self.add("MatMul", self.narrow(x), self.narrow_constant(weight.t())))

    def product(self, a: str, b: str) -> str:
        """a times b, both computed: float32 in, float32 out."""
        return self.wide(self.add("MatMul", self.narrow(a), self.narrow(b)))

    def quantized_input(self, x: str, amax: float) -> str:
        if x not in self.quantized:
            scale = self.constant(np.float32(max(amax, _LEAST) / self.largest))
            zero = self.stored(np.float32(0), self.quantized_type)
            self.quantized[x] = self.add("DequantizeLinear", self.add("QuantizeLinear", x, scale, zero), scale, zero)
        return self.quantized[x]

    def quantized_weight(self, weight: torch.Tensor) -> str:
        """One scale an output channel; stored as it is multiplied, with a DequantizeLinear alone."""
        scale = weight.abs().amax(dim=1).clamp(min=_LEAST) / self.largest
        values = (weight / scale[:, None]).t().contiguous().numpy()
        zero = self.stored(np.zeros(len(scale), np.float32), self.quantized_type)
        stored = self.stored(values, self.quantized_type)
        return self.add("DequantizeLinear", stored, self.constant(scale), zero, axis=1)

    def narrow(self, x: str) -> str:
        return self.add("Cast", x, to=self.narrow_type)

    def wide(self, x: str) -> str:
        return self.add("Cast", x, to=TensorProto.FLOAT)

    def narrow_constant(self, value: torch.Tensor) -> str:
        return self.stored(value.float().contiguous().numpy(), self.narrow_type)

    def stored(self, values: np.ndarray | np.generic, element_type: int) -> str:
        """A constant of ``element_type``, rounded to nearest even."""
        kind = helper.tensor_dtype_to_np_dtype(element_type)
        array = np.rint(values) if np.issubdtype(kind, np.integer) else np.asarray(values)
        return self.constant(np.asarray(array).astype(kind))
