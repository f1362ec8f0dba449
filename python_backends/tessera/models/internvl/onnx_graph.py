"""InternViT as a graph for onnxruntime: uint8 "tiles" [n, side, side, 3] in, "embeddings" [n, tokens, hidden] out.

The graph is written node by node from an :class:`InternViT`, so it holds what the tower computes and nothing else;
float32 throughout, with onnxruntime's own GELU. Each layer's output is a tensor named ``layers.N``
(the first layer's input is ``embedded``), for comparing by layer. ``build/vision/export_graph.py`` writes the same in
standard operators, also with the types that TensorRT wants.
"""

from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tessera.models.internvl.vision import MLP, Attention, InternViT, Layer

FINGERPRINT = "tessera.fingerprint"
PRECISION = "tessera.precision"
_FUSED = "com.microsoft"
_MOST, _MIDDLE = 63, 128  # the largest weight in int8; the middle of a pixel's values
_IR_VERSIONS = {17: 8, 19: 9}  # of an opset


def vision_graph(tower: InternViT, fingerprint: str = "", int8: bool = False) -> onnx.ModelProto:
    """Write the graph of a float32 tower whose constants are folded (as ``load_tower`` gives it).

    ``fingerprint`` is stored in the model's metadata. The weights lie inside the model (protobuf's limit: 2 GiB).
    """
    return Int8Writer(tower).model(fingerprint, "int8") if int8 else GraphWriter(tower).model(fingerprint)


class GraphWriter:
    """Collects nodes and constants; every method adds nodes and returns the name of the tensor they make."""

    tiles, rows, rows_type = "tiles", "embeddings", TensorProto.FLOAT
    domains: tuple[str, ...] = (_FUSED,)  # of operators beside the standard's
    opset = 17

    def __init__(self, tower: InternViT) -> None:
        self.tower = tower
        self.width = tower.class_embedding.shape[-1]
        self.tokens = tower.position_embedding.shape[1]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def model(self, fingerprint: str, precision: str = "float32") -> onnx.ModelProto:
        tower = self.tower
        x = self.embed(self.tiles)
        for number, layer in enumerate(tower.blocks[: tower.depth]):
            x = self.layer(x, layer, f"layers.{number}")
        if tower.final_norm is not None and tower.normed:
            x = self.norm(x, tower.final_norm)
        self.finish(self.project(x, "embeddings"))
        graph = helper.make_graph(
            self.nodes,
            "vision",
            [helper.make_tensor_value_info(self.tiles, TensorProto.UINT8, ["n", *tower.unit_shape])],
            [helper.make_tensor_value_info(self.rows, self.rows_type, ["n", *tower.row_shape])],
            self.constants,
        )
        domains = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(name, 1) for name in self.domains)]
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

    def embed(self, tiles: str) -> str:
        tower, positions = self.tower, self.tower.position_embedding
        patch, side = tower.patch, (tower.grid, tower.merge, tower.patch)
        # Colours stay beside their pixel, so the last two axes travel as one.
        blocks = self.reshape(self.pixels(tiles), -1, *side, tower.grid, tower.merge, patch * 3)
        order = (0, 4, 1, 2, 5, 3, 6) if tower.transposed else (0, 1, 4, 2, 5, 3, 6)
        patches = self.reshape(self.add("Transpose", blocks, perm=order), -1, self.tokens - 1, 3 * patch**2)
        x = self.class_row(self.embed_patches(patches))
        first = tower.class_embedding + positions[:, :1]
        return self.add("Add", x, self.constant(torch.cat((first, positions[:, 1:]), dim=1)), out="embedded")

    def class_row(self, patches: str) -> str:
        """A row of zeros before the patches."""
        return self.add("Pad", patches, self.constant(np.array([0, 1, 0, 0, 0, 0])))

    def layer(self, x: str, layer: Layer, out: str) -> str:
        update = self.linear(self.attention(self.norm(x, layer.norm1), layer.attention), layer.attention.output)
        x = self.add("Add", x, update)
        return self.add("Add", x, self.mlp(self.norm(x, layer.norm2), layer.mlp), out=out)

    def mlp(self, x: str, mlp: MLP, out: str = "") -> str:
        return self.linear(self.activation(self.linear(x, mlp.linear1), mlp.activation_name), mlp.linear2, out)

    def attention(self, x: str, attention: Attention) -> str:
        """Written out: onnxruntime's own operator takes a tenth longer than its products one by one."""
        parts = [self.matrix(x, weight, attention.qkv) for weight in attention.qkv.weight.chunk(3)]
        if attention.qkv.bias is not None:
            biases = attention.qkv.bias.chunk(3)
            parts = [self.add("Add", y, self.constant(bias)) for y, bias in zip(parts, biases, strict=True)]
        norms = attention.q_norm, attention.k_norm
        parts[:2] = [y if n is None else self.norm(y, n) for y, n in zip(parts, norms, strict=False)]
        size = self.width // attention.heads
        query, key, value = (
            self.add("Transpose", self.reshape(y, -1, self.tokens, attention.heads, size), perm=perm)
            for y, perm in zip(parts, ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True)
        )
        scores = self.product(self.times(query, size**-0.5), key)
        rows = self.product(self.add("Softmax", scores, axis=-1), value)
        return self.reshape(self.add("Transpose", rows, perm=(0, 2, 1, 3)), -1, self.tokens, self.width)

    def product(self, a: str, b: str) -> str:
        """a times b, both computed: float32 in, float32 out."""
        return self.add("MatMul", a, b)

    def project(self, x: str, out: str) -> str:
        projector, constants = self.tower.projector, ([1], [self.tokens], [1])
        x = self.add("Slice", x, *(self.constant(np.array(values)) for values in constants))
        x = self.norm(self.reshape(x, -1, self.tower.grid**2, projector.linear1.in_features), projector.norm)
        return self.mlp(x, projector, out)

    def linear(self, x: str, linear: torch.nn.Linear, out: str = "") -> str:
        return self.add("Add", self.matrix(x, linear.weight, linear), self.constant(linear.bias), out=out)

    def norm(self, x: str, norm: torch.nn.Module) -> str:
        if isinstance(norm, torch.nn.RMSNorm):
            square = self.add("Pow", x, self.constant(np.float32(2)))
            mean = self.add("ReduceMean", square, axes=[-1], keepdims=1)
            root = self.add("Sqrt", self.add("Add", mean, self.constant(np.float32(norm.eps))))
            return self.add("Mul", self.add("Div", x, root), self.constant(norm.weight))
        assert isinstance(norm, torch.nn.LayerNorm)
        scale, shift = self.constant(norm.weight), self.constant(norm.bias)
        return self.add("LayerNormalization", x, scale, shift, axis=-1, epsilon=norm.eps)

    def activation(self, x: str, name: str) -> str:
        if name == "relu":
            return self.add("Relu", x)
        if name == "silu":
            return self.times(x, self.add("Sigmoid", x))
        if name == "quick_gelu":
            return self.times(x, self.add("Sigmoid", self.times(x, 1.702)))
        if name == "gelu":
            return self.gelu(x)
        cube = self.times(self.times(self.times(x, x), x), 0.044715)
        inner = self.times(self.add("Add", x, cube), (2 / np.pi) ** 0.5)
        return self.gelu_of(x, self.add("Tanh", inner))

    def gelu(self, x: str) -> str:
        return self.add("Gelu", x, domain=_FUSED)

    def gelu_of(self, x: str, bend: str) -> str:
        """x / 2 * (1 + bend), which is a GELU where bend is its erf or tanh."""
        return self.times(self.times(x, 0.5), self.add("Add", bend, self.constant(np.float32(1))))

    def times(self, a: str, b: str | float) -> str:
        return self.add("Mul", a, b if isinstance(b, str) else self.constant(np.float32(b)))

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


class Int8Writer(GraphWriter):
    """Has the linear layers multiply integers: what goes into one is rounded to uint8 over its range in this forward,
    its weights to int8 with a scale for each output channel. Attention, norms and GELU stay in float32.

    Weights take 7 bits: of 8, sums of two products overflow where a CPU has AVX2 alone, and other CPUs would give other
    rows. Pixels are integers already, and are taken as they are less 128, so that errors of weights average out.
    """

    def __init__(self, tower: InternViT) -> None:
        super().__init__(tower)
        self._rounded: dict[str, list[str]] = {}

    def embed_patches(self, patches: str) -> str:
        layer = self.tower.patch_embedding
        one, middle = self.constant(np.float32(1)), self.constant(np.uint8(_MIDDLE))
        bias = layer.bias + _MIDDLE * layer.weight.sum(1)
        return self.add("Add", self._product([patches, one, middle], layer.weight), self.constant(bias))

    def matrix(self, x: str, weight: torch.Tensor, layer: torch.nn.Linear) -> str:
        if x not in self._rounded:  # q, k and v have one input
            name = f"rounded_{len(self.nodes)}"
            self._rounded[x] = [name, f"{name}.scale", f"{name}.zero"]
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], self._rounded[x], name=name))
        return self._product(self._rounded[x], weight)

    def _product(self, x: list[str], weight: torch.Tensor) -> str:
        """x: its integers, their scale and what of them stands for zero -> float32."""
        values, scale, zero = x
        scales = weight.detach().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / _MOST
        codes = (weight.detach() / scales[:, None]).round().to(torch.int8).t().numpy()
        weights = self.constant(codes), scale, self.constant(scales), zero
        return self.add("MatMulIntegerToFloat", values, *weights, domain=_FUSED)
