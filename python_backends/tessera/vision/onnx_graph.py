"""The vision tower as an ONNX graph: uint8 tiles [n, side, side, 3] in, rows [n, tokens, hidden] out.

The graph is written node by node from an :class:`InternViT`, so it holds what the tower computes and nothing else. The
targets share everything but a few spots:

- ``onnxruntime`` uses that runtime's own fused attention and GELU; float32 throughout, "tiles" -> "embeddings".
- ``portable`` has standard operators only (opset 17); float32 throughout, "tiles" -> "embeddings".
- ``tensorrt`` is ``portable`` for a strongly typed network: the types stand in the graph. Matrix products take narrow
  operands (float16, bfloat16, or quantised ones) and all between them is float32: residual stream, norms, softmax,
  activations, biases. "TILES" -> bfloat16 "EMBEDDINGS", as the stages name them.

The rows in float32 are a tensor named ``embeddings`` for every target, each layer's output is one named ``layers.N``
(the first layer's input is ``embedded``), for comparing by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tessera.errors import ConfigError
from tessera.vision.calibration import Quantization, quantized_layers
from tessera.vision.intern_vit import Attention, InternViT, Layer, RMSNorm

TARGETS = ("onnxruntime", "portable", "tensorrt")
INPUTS = {"onnxruntime": "tiles", "portable": "tiles", "tensorrt": "TILES"}
OUTPUTS = {"onnxruntime": "embeddings", "portable": "embeddings", "tensorrt": "EMBEDDINGS"}
PRECISIONS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
FINGERPRINT = "tessera.fingerprint"
PRECISION = "tessera.precision"
_FUSED = "com.microsoft"
_OPSET = 17
_OPSET_FP8 = 19  # the first whose QuantizeLinear knows float8
_IR_VERSIONS = {_OPSET: 8, _OPSET_FP8: 9}
# Pixels are scaled into 0..1 by a power of two, which rounds nothing: the patch embedding's weights, which hold the
# division by 255, would else be subnormal numbers in float16.
_PIXEL_SCALE = 256.0
_LEAST = 1e-12  # the magnitude that a tensor of zeros counts as, so that no scale is 0


def vision_graph(
    tower: InternViT,
    target: str = "onnxruntime",
    fingerprint: str = "",
    precision: str = "float16",
    quantization: Quantization | None = None,
) -> onnx.ModelProto:
    """Write the graph of a float32 tower whose constants are folded (as ``load_vision`` gives it).

    ``fingerprint`` is stored in the model's metadata. The weights lie inside the model (protobuf's limit: 2 GiB).
    For the target ``tensorrt``, ``precision`` is the type of the matrix products' operands, and ``quantization`` gives
    the layers' linear maps explicit Q/DQ nodes instead (attention and projector keep ``precision``).
    """
    if target not in TARGETS:
        raise ConfigError(f"ONNX target {target!r} is not known; known are {', '.join(TARGETS)}")
    if target != "tensorrt":
        return _Writer(tower, target == "onnxruntime").model(fingerprint, "float32")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is not known; known are {', '.join(PRECISIONS)}")
    writer = _TypedWriter(tower, PRECISIONS[precision], quantization)
    return writer.model(fingerprint, f"{quantization.kind} and {precision}" if quantization else precision)


class _Writer:
    """Collects nodes and constants; every method adds nodes and returns the name of the tensor they make."""

    tiles, rows, rows_type = INPUTS["portable"], OUTPUTS["portable"], TensorProto.FLOAT
    opset = _OPSET

    def __init__(self, tower: InternViT, fused: bool) -> None:
        self.tower = tower
        self.fused = fused
        self.width = tower.class_embedding.shape[-1]
        self.tokens = tower.position_embedding.shape[1]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def model(self, fingerprint: str, precision: str) -> onnx.ModelProto:
        tower = self.tower
        side = tower.grid * tower.merge * tower.patch
        rows, hidden = tower.grid**2, tower.projector.linear2.out_features
        x = self.embed(self.tiles)
        for number, layer in enumerate(tower.blocks[: tower.depth]):
            x = self.layer(x, layer, f"layers.{number}")
        if tower.final_norm is not None and tower.normed:
            x = self.norm(x, tower.final_norm)
        self.finish(self.project(x, "embeddings"))
        graph = helper.make_graph(
            self.nodes,
            "vision",
            [helper.make_tensor_value_info(self.tiles, TensorProto.UINT8, ["n", side, side, 3])],
            [helper.make_tensor_value_info(self.rows, self.rows_type, ["n", rows, hidden])],
            self.constants,
        )
        domains = [helper.make_opsetid("", self.opset)] + [helper.make_opsetid(_FUSED, 1)] * self.fused
        version = _IR_VERSIONS[self.opset]
        model = helper.make_model(graph, opset_imports=domains, ir_version=version, producer_name="tessera")
        helper.set_model_props(model, {FINGERPRINT: fingerprint, PRECISION: precision})
        return model

    def finish(self, rows: str) -> None:
        """Make the output of the rows in float32: here they are it."""

    def pixels(self, tiles: str) -> str:
        """The tiles in the type in which patches are cut out of them."""
        return tiles

    def embed_patches(self, patches: str) -> str:
        return self.linear(self.add("Cast", patches, to=TensorProto.FLOAT), self.tower.patch_embedding)

    def matrix(self, x: str, weight: torch.Tensor, layer: torch.nn.Linear) -> str:
        """x times the transposed weight, which is ``layer``'s or a part of it: float32 in, float32 out."""
        return self.add("MatMul", x, self.constant(weight.t()))

    def product(self, a: str, b: str) -> str:
        """a times b, both computed: float32 in, float32 out."""
        return self.add("MatMul", a, b)

    def embed(self, tiles: str) -> str:
        tower, positions = self.tower, self.tower.position_embedding
        patch, side = tower.patch, (tower.grid, tower.merge, tower.patch)
        # Colours stay beside their pixel, so the last two axes travel as one.
        blocks = self.reshape(self.pixels(tiles), -1, *side, tower.grid, tower.merge, patch * 3)
        order = (0, 4, 1, 2, 5, 3, 6) if tower.transposed else (0, 1, 4, 2, 5, 3, 6)
        patches = self.reshape(self.add("Transpose", blocks, perm=order), -1, self.tokens - 1, 3 * patch**2)
        x = self.add("Add", self.embed_patches(patches), self.constant(positions[:, 1:]))
        count = self.add("Shape", x, start=0, end=1)
        shape = self.add("Concat", count, self.constant(np.array([1, self.width])), axis=0)
        cls = self.add("Expand", self.constant(tower.class_embedding + positions[:, :1]), shape)
        return self.add("Concat", cls, x, axis=1, out="embedded")

    def layer(self, x: str, layer: Layer, out: str) -> str:
        update = self.linear(self.attention(self.norm(x, layer.norm1), layer.attention), layer.attention.output)
        x = self.add("Add", x, update)
        hidden = self.activation(self.linear(self.norm(x, layer.norm2), layer.mlp.linear1), layer.mlp.activation_name)
        return self.add("Add", x, self.linear(hidden, layer.mlp.linear2), out=out)

    def attention(self, x: str, attention: Attention) -> str:
        weights = attention.qkv.weight.chunk(3)
        parts = [self.matrix(x, weight, attention.qkv) for weight in weights]
        bias, norms = attention.qkv.bias, (attention.q_norm, attention.k_norm)
        fuse_bias = self.fused and bias is not None and attention.q_norm is None
        if bias is not None and not fuse_bias:
            parts = [self.add("Add", y, self.constant(b)) for y, b in zip(parts, bias.chunk(3), strict=True)]
        parts[:2] = [y if n is None else self.norm(y, n) for y, n in zip(parts, norms, strict=False)]
        if self.fused:
            extra = [self.constant(bias)] if fuse_bias else []
            return self.add("MultiHeadAttention", *parts, *extra, domain=_FUSED, num_heads=attention.heads)
        size = self.width // attention.heads
        query, key, value = (
            self.add("Transpose", self.reshape(y, -1, self.tokens, attention.heads, size), perm=perm)
            for y, perm in zip(parts, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
        )
        query = self.add("Mul", query, self.constant(np.float32(size**-0.5)))
        rows = self.product(self.add("Softmax", self.product(query, key), axis=-1), value)
        return self.reshape(self.add("Transpose", rows, perm=(0, 2, 1, 3)), -1, self.tokens, self.width)

    def project(self, x: str, out: str) -> str:
        projector, constants = self.tower.projector, ([1], [self.tokens], [1])
        x = self.add("Slice", x, *(self.constant(np.array(values)) for values in constants))
        x = self.norm(self.reshape(x, -1, self.tower.grid**2, projector.linear1.in_features), projector.norm)
        x = self.activation(self.linear(x, projector.linear1), projector.activation_name)
        return self.linear(x, projector.linear2, out=out)

    def linear(self, x: str, linear: torch.nn.Linear, out: str = "") -> str:
        return self.add("Add", self.matrix(x, linear.weight, linear), self.constant(linear.bias), out=out)

    def norm(self, x: str, norm: torch.nn.Module) -> str:
        if isinstance(norm, RMSNorm):
            square = self.add("Pow", x, self.constant(np.float32(2)))
            mean = self.add("ReduceMean", square, axes=[-1], keepdims=1)
            root = self.add("Sqrt", self.add("Add", mean, self.constant(np.float32(norm.eps))))
            return self.add("Mul", self.add("Div", x, root), self.constant(norm.weight))
        assert isinstance(norm, torch.nn.LayerNorm)
        scale, shift = self.constant(norm.weight), self.constant(norm.bias)
        return self.add("LayerNormalization", x, scale, shift, axis=-1, epsilon=norm.eps)

    def activation(self, x: str, name: str) -> str:
        def times(a: str, b: str | float) -> str:
            return self.add("Mul", a, b if isinstance(b, str) else self.constant(np.float32(b)))

        def plus_one(a: str) -> str:
            return self.add("Add", a, self.constant(np.float32(1)))

        if name == "relu":
            return self.add("Relu", x)
        if name == "silu":
            return times(x, self.add("Sigmoid", x))
        if name == "quick_gelu":
            return times(x, self.add("Sigmoid", times(x, 1.702)))
        if name == "gelu":
            if self.fused:
                return self.add("Gelu", x, domain=_FUSED)
            return times(times(x, 0.5), plus_one(self.add("Erf", times(x, 2**-0.5))))
        cube = times(times(times(x, x), x), 0.044715)
        inner = times(self.add("Add", x, cube), (2 / np.pi) ** 0.5)
        return times(times(x, 0.5), plus_one(self.add("Tanh", inner)))

    def reshape(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.constant(np.array(shape)))

    def constant(self, value: torch.Tensor | np.ndarray | np.generic) -> str:
        array = value.detach().float().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name

    def add(self, operator: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        name = f"{operator}_{len(self.nodes)}"
        node = helper.make_node(operator, inputs, [out or name], name=name, domain=domain, **attributes)
        self.nodes.append(node)
        return out or name


class _TypedWriter(_Writer):
    """The types of a strongly typed network: narrow operands for matrix products, float32 for all else."""

    tiles, rows, rows_type = INPUTS["tensorrt"], OUTPUTS["tensorrt"], TensorProto.BFLOAT16

    def __init__(self, tower: InternViT, narrow: int, quantization: Quantization | None) -> None:
        super().__init__(tower, fused=False)
        self.narrow_type = narrow
        self.quantization = quantization
        self.quantized: dict[str, str] = {}  # a tensor -> itself after its Q and DQ, shared by q, k and v
        self.amax: dict[torch.nn.Module, float] = {}
        if quantization:
            layers = quantized_layers(tower)
            self.amax = {layer: quantization.amax[name] for name, layer in layers.items()}
            self.opset = _OPSET_FP8 if quantization.kind == "fp8" else _OPSET

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
        return self.wide(self.add("MatMul", self.narrow(a), self.narrow(b)))

    def quantized_input(self, x: str, amax: float) -> str:
        assert self.quantization is not None
        if x not in self.quantized:
            scale = self.constant(np.float32(max(amax, _LEAST) / self.quantization.largest))
            zero = self.stored(np.float32(0), self.quantization.element_type)
            self.quantized[x] = self.add("DequantizeLinear", self.add("QuantizeLinear", x, scale, zero), scale, zero)
        return self.quantized[x]

    def quantized_weight(self, weight: torch.Tensor) -> str:
        """One scale an output channel; stored as it is multiplied, with a DequantizeLinear alone."""
        assert self.quantization is not None
        scale = weight.abs().amax(dim=1).clamp(min=_LEAST) / self.quantization.largest
        values = (weight / scale[:, None]).t().contiguous().numpy()
        zero = self.stored(np.zeros(len(scale), np.float32), self.quantization.element_type)
        stored = self.stored(values, self.quantization.element_type)
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
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array).astype(kind), name))
        return name
