"""The vision tower as an ONNX graph: uint8 "tiles" [n, side, side, 3] in, float32 "embeddings" [n, tokens, hidden] out.

The graph is written node by node from an :class:`InternViT`, so it holds what the tower computes and nothing else. Two
targets share everything but two spots: ``portable`` has standard operators only (opset 17; what TensorRT reads), and
``onnxruntime`` uses that runtime's own fused attention and GELU.
Each layer's output is a tensor named ``layers.N`` (the first layer's input is ``embedded``), for comparing by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tessera.errors import ConfigError
from tessera.vision.intern_vit import Attention, InternViT, Layer, RMSNorm

TARGETS = ("onnxruntime", "portable")
FINGERPRINT = "tessera.fingerprint"
_FUSED = "com.microsoft"
_OPSET = 17


def vision_graph(tower: InternViT, target: str = "onnxruntime", fingerprint: str = "") -> onnx.ModelProto:
    """Write the graph of a float32 tower whose constants are folded (as ``load_vision`` gives it).

    ``fingerprint`` is stored in the model's metadata. The weights lie inside the model (protobuf's limit: 2 GiB).
    """
    if target not in TARGETS:
        raise ConfigError(f"ONNX target {target!r} is not known; known are {', '.join(TARGETS)}")
    return _Writer(tower, target == "onnxruntime").model(fingerprint)


class _Writer:
    """Collects nodes and constants; every method adds nodes and returns the name of the tensor they make."""

    def __init__(self, tower: InternViT, fused: bool) -> None:
        self.tower = tower
        self.fused = fused
        self.width = tower.class_embedding.shape[-1]
        self.tokens = tower.position_embedding.shape[1]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def model(self, fingerprint: str) -> onnx.ModelProto:
        tower = self.tower
        side = tower.grid * tower.merge * tower.patch
        rows, hidden = tower.grid**2, tower.projector.linear2.out_features
        x = self.embed("tiles")
        for number, layer in enumerate(tower.blocks[: tower.depth]):
            x = self.layer(x, layer, f"layers.{number}")
        if tower.final_norm is not None and tower.normed:
            x = self.norm(x, tower.final_norm)
        self.project(x, "embeddings")
        graph = helper.make_graph(
            self.nodes,
            "vision",
            [helper.make_tensor_value_info("tiles", TensorProto.UINT8, ["n", side, side, 3])],
            [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["n", rows, hidden])],
            self.constants,
        )
        domains = [helper.make_opsetid("", _OPSET)] + [helper.make_opsetid(_FUSED, 1)] * self.fused
        model = helper.make_model(graph, opset_imports=domains, ir_version=8, producer_name="tessera")
        helper.set_model_props(model, {FINGERPRINT: fingerprint})
        return model

    def embed(self, tiles: str) -> str:
        tower, positions = self.tower, self.tower.position_embedding
        patch, side = tower.patch, (tower.grid, tower.merge, tower.patch)
        # Colours stay beside their pixel, so the last two axes travel as one.
        blocks = self.reshape(tiles, -1, *side, tower.grid, tower.merge, patch * 3)
        order = (0, 4, 1, 2, 5, 3, 6) if tower.transposed else (0, 1, 4, 2, 5, 3, 6)
        patches = self.reshape(self.add("Transpose", blocks, perm=order), -1, self.tokens - 1, 3 * patch**2)
        x = self.linear(self.add("Cast", patches, to=TensorProto.FLOAT), tower.patch_embedding)
        x = self.add("Add", x, self.constant(positions[:, 1:]))
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
        parts = [self.add("MatMul", x, self.constant(weight.t())) for weight in weights]
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
        rows = self.add("MatMul", self.add("Softmax", self.add("MatMul", query, key), axis=-1), value)
        return self.reshape(self.add("Transpose", rows, perm=(0, 2, 1, 3)), -1, self.tokens, self.width)

    def project(self, x: str, out: str) -> str:
        projector, constants = self.tower.projector, ([1], [self.tokens], [1])
        x = self.add("Slice", x, *(self.constant(np.array(values)) for values in constants))
        x = self.norm(self.reshape(x, -1, self.tower.grid**2, projector.linear1.in_features), projector.norm)
        x = self.activation(self.linear(x, projector.linear1), projector.activation_name)
        return self.linear(x, projector.linear2, out=out)

    def linear(self, x: str, linear: torch.nn.Linear, out: str = "") -> str:
        x = self.add("MatMul", x, self.constant(linear.weight.t()))
        return self.add("Add", x, self.constant(linear.bias), out=out)

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
