"""The graph for TensorRT: which types stand where, its Q/DQ nodes and their scales, and what it computes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from bench import quality
from check_export import for_cpu
from document_shape import build_config
from export_vision_onnx import KINDS, PRECISIONS, Quantization, calibrate, quantized_layers, tensorrt_graph
from onnx import TensorProto, numpy_helper
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.vision.onnx_runner import OnnxRunner, graph_path
from tessera.vision.torch_runner import TorchRunner

BUILD = Path(__file__).resolve().parents[2] / "build"
SMALL = dict(image_size=56, patch_size=14)
SHAPES = [
    Shape(**SMALL),
    Shape(**SMALL, norm_type="rms_norm", qk_norm=True, hidden_act="gelu_pytorch_tanh"),
    Shape(**SMALL, attention_bias=False, feature_layer=-2, hidden_act="silu"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return hf_native(tmp_path_factory.mktemp("tiny") / "checkpoint", Shape(**SMALL))


@pytest.fixture(scope="module")
def tower(checkpoint) -> InternViT:
    return load_tower(read_config(checkpoint))


def tiles(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 56, 56, 3), dtype=np.uint8)


def cosine(tower: InternViT, model: onnx.ModelProto) -> float:
    pixels = tiles(3)
    rows = OnnxRunner(for_cpu(model).SerializeToString()).run(pixels)
    return float(torch.nn.functional.cosine_similarity(rows, TorchRunner(tower).run(pixels), dim=-1).min())


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {constant.name: constant.data_type for constant in model.graph.initializer}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.norm_type}-{shape.hidden_act}")
@pytest.mark.parametrize(("precision", "bound"), [("float32", 0.999999), ("float16", 0.9999), ("bfloat16", 0.999)])
def test_it_computes_what_torch_does(tmp_path, shape, precision, bound):
    tower = load_tower(read_config(hf_native(tmp_path, shape)))
    model = tensorrt_graph(tower, precision=precision)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert cosine(tower, model) >= bound


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_matrix_products_are_narrow_and_all_else_is_float32(tower, precision):
    model = tensorrt_graph(tower, precision=precision)
    types, narrow = element_types(model), PRECISIONS[precision]
    assert (types["TILES"], types["EMBEDDINGS"]) == (TensorProto.UINT8, TensorProto.BFLOAT16)
    assert types["layers.0"] == types["embeddings"] == TensorProto.FLOAT  # the residual stream is never narrow
    for node in model.graph.node:
        if node.op_type == "MatMul":
            assert {types[name] for name in node.input} == {narrow}
        elif node.op_type in ("LayerNormalization", "Softmax", "Erf", "Add"):
            assert {types[name] for name in node.input} == {TensorProto.FLOAT}, node.name
    # TensorRT takes uint8 as a network's input only, and nothing but a change of type of it.
    assert [node.op_type for node in model.graph.node if "TILES" in node.input] == ["Cast"]


def test_small_patch_weights_keep_their_bits(tower):
    """Float16 loses bits below 2^-14, and the weights, which hold the division of pixels by 255, go there."""
    model = tensorrt_graph(tower)
    constants = {constant.name: constant for constant in model.graph.initializer}
    first = next(node for node in model.graph.node if node.op_type == "MatMul")
    stored = numpy_helper.to_array(constants[first.input[1]]).astype(np.float32)
    exact = tower.patch_embedding.weight.t().numpy()
    near = dict(rtol=2**-11, atol=2**-33)
    assert np.allclose(stored / 256, exact, **near)
    assert not np.allclose(exact.astype(np.float16).astype(np.float32), exact, **near)


@pytest.mark.parametrize(("kind", "stored"), [("int8", TensorProto.INT8), ("fp8", TensorProto.FLOAT8E4M3FN)])
def test_quantised_graphs_hold_q_and_dq_with_the_measured_scales(tower, kind, stored):
    quantization = calibrate(tower, [torch.from_numpy(tiles(4, seed=1))], kind)
    model = tensorrt_graph(tower, quantization=quantization)
    onnx.checker.check_model(model, full_check=True)
    counts = Counter(node.op_type for node in model.graph.node)
    # A layer has four inputs to quantise (q, k and v share one) and six weights, which lie there quantised.
    assert counts["QuantizeLinear"] == 4 * tower.depth
    assert counts["DequantizeLinear"] == (4 + 6) * tower.depth
    constants = {constant.name: constant for constant in model.graph.initializer}
    scales = [
        float(numpy_helper.to_array(constants[node.input[1]]))
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    ]
    assert scales == pytest.approx([amax / KINDS[kind][1] for amax in quantization.amax.values()])
    weights = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
    assert {constants[node.input[0]].data_type for node in weights} == {stored}
    first = weights[0]  # q of the first layer
    scale = numpy_helper.to_array(constants[first.input[1]])
    back = numpy_helper.to_array(constants[first.input[0]]).astype(np.float32) * scale
    exact = tower.blocks[0].attention.qkv.weight.chunk(3)[0].t().numpy()
    assert scale.shape == (exact.shape[1],)  # one an output channel
    step = scale if kind == "int8" else np.abs(exact).max(axis=0) / 8
    assert (np.abs(back - exact) <= 0.5001 * step).all()
    assert 0.99 < cosine(tower, model) < 0.99999


def test_calibration_sees_what_the_layers_get(tower):
    batches = [torch.from_numpy(tiles(2, seed)) for seed in (3, 4)]
    measured = calibrate(tower, batches, "int8").amax
    inputs = []
    handle = tower.blocks[1].mlp.linear2.register_forward_pre_hook(lambda _, args: inputs.append(args[0].abs()))
    with torch.inference_mode():
        for batch in batches:
            tower(batch)
    handle.remove()
    seen = torch.cat([each.flatten() for each in inputs])
    assert list(measured) == list(quantized_layers(tower))
    assert measured["layers.1.mlp.linear2"] == pytest.approx(float(seen.max()))
    with pytest.raises(ConfigError, match="at least one tile"):
        calibrate(tower, [], "int8")
    with pytest.raises(ConfigError, match="int4"):
        Quantization("int4", {})


def test_bfloat16_is_rounded_on_the_cpu_where_the_graph_says(tower):
    """Not float32 under another name: rows differ from float32's as bfloat16 makes them."""
    wide, narrow = (tensorrt_graph(tower, precision=name) for name in ("float32", "bfloat16"))
    pixels = tiles(2)
    rows = [OnnxRunner(for_cpu(model).SerializeToString()).run(pixels) for model in (wide, narrow)]
    difference = (rows[0] - rows[1]).abs().max() / rows[0].abs().max()
    assert 1e-4 < float(difference) < 0.05


def test_recall_is_measured_on_the_exported_graph(tower, tmp_path, monkeypatch):
    """`bench recall` puts the graph where the CPU stage finds its own."""
    graph = tensorrt_graph(tower, "the weights", quantization=calibrate(tower, [torch.from_numpy(tiles(1))], "int8"))
    onnx.save(graph, str(tmp_path / "typed.onnx"))
    monkeypatch.setenv("TESSERA_CACHE", "")
    assert quality.use_graph(tmp_path, tmp_path / "typed.onnx") == "int8"
    kept = graph_path("the weights")
    assert kept.parent == tmp_path
    runner = OnnxRunner(kept)
    expected = OnnxRunner(for_cpu(graph).SerializeToString()).run(tiles(2))
    assert torch.equal(runner.run(tiles(2)), expected)


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BUILD / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_export_calibrate_and_check_by_command(checkpoint, tmp_path):
    out = tmp_path / "typed.onnx"
    given = ("--checkpoint", checkpoint, "--out", out, "--target", "tensorrt")
    exported = run("export_vision_onnx.py", *given, "--quantize", "int8", "--count", 2)
    assert exported.returncode == 0, exported.stderr
    checked = run("check_export.py", "--checkpoint", checkpoint, "--onnx", out)
    assert checked.returncode == 0, checked.stderr
    result = json.loads(checked.stdout)
    assert result["precision"] == "int8 and float16" and 0.99 <= result["cosine"] < 0.9999
    strict = run("check_export.py", "--checkpoint", checkpoint, "--onnx", out, "--cosine", 0.9999)
    assert strict.returncode == 1
    assert "the first tensor below it is layers.0" in strict.stderr
    assert json.loads(strict.stdout)["layers"]["embedded"]["cosine"] > 0.9999


def test_what_does_not_go_together_is_refused(checkpoint, tmp_path):
    refused = run("export_vision_onnx.py", "--checkpoint", checkpoint, "--out", tmp_path / "a", "--quantize", "int8")
    assert refused.returncode == 2 and "--target tensorrt" in refused.stderr
    (tmp_path / "empty").mkdir()
    given = ("--checkpoint", checkpoint, "--out", tmp_path / "a", "--target", "tensorrt", "--quantize", "int8")
    build_config().save_pretrained(tmp_path / "documents")
    refused = run("export_vision_onnx.py", "--checkpoint", tmp_path / "documents", "--random-weights", *given[2:])
    assert refused.returncode == 1 and "no graph for the vision tower of" in refused.stderr
    refused = run("export_vision_onnx.py", *given, "--pictures", tmp_path / "empty")
    assert refused.returncode == 1 and "--pictures" in refused.stderr
    assert not (tmp_path / "a").exists()
