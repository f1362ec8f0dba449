"""The graph for TensorRT: which types stand where, its Q/DQ nodes and their scales, and what it computes on the CPU."""

import json
from collections import Counter
from pathlib import Path

import check_graph
import export_graph
import numpy as np
import onnx
import pytest
import torch
from bench import quality
from check_graph import for_cpu
from checkpoints import DOCUMENTS
from export_graph import KINDS, PRECISIONS, calibrate, quantized_layers, tensorrt_graph
from onnx import TensorProto, numpy_helper
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.models.internvl.vision import InternViT
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.vision.onnx_runner import OnnxRunner, graph_path
from tessera.vision.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return hf_native(tmp_path_factory.mktemp("tiny") / "checkpoint", Shape(image_size=56, patch_size=14))


@pytest.fixture(scope="module")
def tower(checkpoint) -> InternViT:
    return load_tower(read_config(checkpoint))


def tiles(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 56, 56, 3), dtype=np.uint8)


def rows_of(model: onnx.ModelProto) -> torch.Tensor:
    return OnnxRunner(for_cpu(model).SerializeToString()).run(tiles(3))


def cosine(tower: InternViT, model: onnx.ModelProto) -> float:
    return float(torch.nn.functional.cosine_similarity(rows_of(model), TorchRunner(tower).run(tiles(3)), dim=-1).min())


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {constant.name: constant.data_type for constant in model.graph.initializer}


@pytest.mark.parametrize(("precision", "bound"), [("float16", 0.9999), ("bfloat16", 0.999)])
def test_matrix_products_are_narrow_and_all_else_is_float32(tower, precision, bound):
    model = tensorrt_graph(tower, precision=precision)
    onnx.checker.check_model(model, full_check=True)
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
    assert cosine(tower, model) >= bound


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
    measured = calibrate(tower, [torch.from_numpy(tiles(4, seed=1))])
    model = tensorrt_graph(tower, quantize=kind, amax=measured)
    onnx.checker.check_model(model, full_check=True)
    counts = Counter(node.op_type for node in model.graph.node)
    # A layer has four inputs to quantise (q, k and v share one) and six weights, which lie there quantised.
    assert counts["QuantizeLinear"] == 4 * tower.depth
    assert counts["DequantizeLinear"] == (4 + 6) * tower.depth
    constants = {constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer}
    scales = [float(constants[node.input[1]]) for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert scales == pytest.approx([amax / KINDS[kind][1] for amax in measured.values()])
    weights = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in constants]
    types = element_types(model)
    assert {types[node.input[0]] for node in weights} == {stored}
    values, scale = (constants[name].astype(np.float32) for name in weights[0].input[:2])  # q of the first layer
    exact = tower.blocks[0].attention.qkv.weight.chunk(3)[0].t().numpy()
    assert scale.shape == (exact.shape[1],)  # one an output channel
    step = scale if kind == "int8" else np.abs(exact).max(axis=0) / 8
    assert (np.abs(values * scale - exact) <= 0.5001 * step).all()
    assert 0.99 < cosine(tower, model) < 0.99999


def test_calibration_sees_what_the_layers_get(tower):
    batches = [torch.from_numpy(tiles(2, seed)) for seed in (3, 4)]
    measured = calibrate(tower, batches)
    inputs = []
    handle = tower.blocks[1].mlp.linear2.register_forward_pre_hook(lambda _, args: inputs.append(args[0].abs().max()))
    with torch.inference_mode():
        for batch in batches:
            tower(batch)
    handle.remove()
    assert list(measured) == list(quantized_layers(tower))
    assert measured["layers.1.mlp.linear2"] == pytest.approx(float(max(inputs)))
    with pytest.raises(ConfigError, match="at least one tile"):
        calibrate(tower, [])


def test_bfloat16_is_rounded_on_the_cpu_where_the_graph_says(tower):
    """Not float32 under another name: rows differ from float32's as bfloat16 makes them."""
    wide, narrow = (rows_of(tensorrt_graph(tower, precision=name)) for name in ("float32", "bfloat16"))
    assert 1e-4 < float((wide - narrow).abs().max() / wide.abs().max()) < 0.05


def test_recall_is_measured_on_the_exported_graph(tower, tmp_path, monkeypatch):
    """`bench recall` puts the graph where the CPU stage finds its own."""
    measured = calibrate(tower, [torch.from_numpy(tiles(1))])
    graph = tensorrt_graph(tower, "the weights", quantize="int8", amax=measured)
    onnx.save(graph, str(tmp_path / "typed.onnx"))
    monkeypatch.setenv("TESSERA_CACHE", "")
    assert quality.use_graph(tmp_path, tmp_path / "typed.onnx") == "int8"
    kept = graph_path("the weights")
    assert kept.parent == tmp_path
    assert torch.equal(OnnxRunner(kept).run(tiles(3)), rows_of(graph))


def test_export_calibrate_and_check_by_command(checkpoint, tmp_path, capsys):
    out = str(tmp_path / "typed.onnx")
    given = ["--checkpoint", str(checkpoint), "--out", out, "--target", "tensorrt"]
    assert export_graph.main([*given, "--quantize", "int8", "--count", "2"]) == 0
    capsys.readouterr()
    checked = ["--checkpoint", str(checkpoint), "--onnx", out]
    assert check_graph.main(checked) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["precision"] == "int8 and float16" and 0.99 <= result["cosine"] < 0.9999
    assert check_graph.main([*checked, "--cosine", "0.9999"]) == 1
    said = capsys.readouterr()
    assert "the first tensor below it is layers.0" in said.err
    assert json.loads(said.out)["layers"]["embedded"]["cosine"] > 0.9999


def test_what_does_not_go_together_is_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    given = ["--out", str(tmp_path / "a"), "--quantize", "int8", "--checkpoint"]
    for arguments, words in (
        ((checkpoint,), "--precision and --quantize are for --target tensorrt"),
        ((checkpoint, "--target", "tensorrt", "--count", "0"), "--count wants a number of 1 or more"),
        ((DOCUMENTS, "--random-weights", "--target", "tensorrt"), "no graph for the vision tower of"),
        ((checkpoint, "--target", "tensorrt", "--pictures", tmp_path / "empty"), "--pictures: no .jpeg"),
    ):
        try:
            assert export_graph.main([*given, *map(str, arguments)]) == 1
        except SystemExit as refused:
            assert refused.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
