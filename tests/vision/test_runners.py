"""The runners against each other, and the exported file against the checkpoint it came from."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.checkpoint.config import read_config
from tessera.errors import CheckpointError, ConfigError
from tessera.vision.encoder import VisionEncoder
from tessera.vision.intern_vit import load_vision
from tessera.vision.onnx_graph import vision_graph
from tessera.vision.onnx_runner import OnnxRunner
from tessera.vision.pictures import VisionItem
from tessera.vision.settings import VisionSettings
from tessera.vision.torch_runner import TorchRunner

BUILD = Path(__file__).resolve().parents[2] / "build"
SMALL = dict(image_size=56, patch_size=14)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_native(tmp_path_factory.mktemp("tiny") / "checkpoint", Shape(**SMALL))


def tiles(count, side=56, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize("target", ["onnxruntime", "portable"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(**SMALL),
        Shape(**SMALL, norm_type="rms_norm", qk_norm=True),
        Shape(**SMALL, attention_bias=False, feature_layer=-2),
        Shape(**SMALL, mean_pooling=False),
        *(Shape(**SMALL, hidden_act=name) for name in ("gelu_pytorch_tanh", "quick_gelu", "relu", "silu")),
    ],
    ids=lambda shape: f"{shape.norm_type}-{shape.hidden_act}-{shape.feature_layer}-{shape.mean_pooling}",
)
def test_the_graph_computes_what_torch_does(tmp_path, shape, target):
    tower = load_vision(read_config(hf_native(tmp_path, shape)))
    model = vision_graph(tower, target)
    runner, pixels = OnnxRunner(model.SerializeToString()), tiles(3)
    torch.testing.assert_close(runner.run(pixels), TorchRunner(tower).run(pixels), atol=2e-5, rtol=1e-5)
    if target == "portable":
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} == {""}


def test_the_transposed_pixel_shuffle(checkpoint, tmp_path):
    shape = Shape(text="llama", **SMALL)
    chat = as_internvl_chat(hf_native(tmp_path / "a", shape), tmp_path / "b", ps_version="v1")
    tower = load_vision(read_config(chat))
    runner, pixels = OnnxRunner(vision_graph(tower).SerializeToString()), tiles(2)
    torch.testing.assert_close(runner.run(pixels), TorchRunner(tower).run(pixels), atol=2e-5, rtol=1e-5)


def test_any_number_of_tiles_gives_each_tile_its_own_rows(checkpoint):
    runner, pixels = OnnxRunner.from_checkpoint(read_config(checkpoint)), tiles(7)
    together = runner.run(pixels)
    assert together.shape == (7, 4, 64)
    alone = torch.cat([runner.run(pixels[i : i + 1]) for i in range(7)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("runner", ["onnx", "torch"])
def test_encoder_from_checkpoint(checkpoint, runner):
    vision = VisionEncoder.from_checkpoint(checkpoint, VisionSettings(runner=runner, infer_batch_size=2))
    pixels = tiles(3)
    item = VisionItem(pixels.ravel(), np.array([0, 3, 56, 56], np.int32), np.array([1, 2], np.int64))
    (rows,) = vision.encode([item])
    expected = TorchRunner.from_checkpoint(read_config(checkpoint)).run(pixels).flatten(0, 1)
    assert rows.shape == (12, 64)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)


def test_bfloat16_stays_near_float32(checkpoint):
    config, pixels = read_config(checkpoint), tiles(2)
    wide = TorchRunner.from_checkpoint(config).run(pixels)
    narrow = TorchRunner.from_checkpoint(config, dtype="bfloat16").run(pixels)
    assert narrow.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(wide, narrow.float(), dim=-1).min() > 0.999


def test_random_weights_need_no_weights_and_repeat(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    settings = VisionSettings(random_weights=True)
    item = VisionItem(tiles(1).ravel(), np.array([0, 1, 56, 56], np.int32), np.array([1, 2], np.int64))
    first, second = (VisionEncoder.from_checkpoint(tmp_path, settings).encode([item])[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.std() > 0
    with pytest.raises(CheckpointError, match="missing"):
        VisionEncoder.from_checkpoint(tmp_path)


def run_script(name, *arguments):
    command = [sys.executable, str(BUILD / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_export_check_and_use(checkpoint, tmp_path):
    out = tmp_path / "new" / "model.onnx"
    exported = run_script("export_vision_onnx.py", "--checkpoint", checkpoint, "--out", out)
    assert exported.returncode == 0, exported.stderr
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.onnx"]
    checked = run_script("check_export.py", "--checkpoint", checkpoint, "--onnx", out)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["cosine"] >= 0.9999

    config, pixels = read_config(checkpoint), tiles(2)
    assert torch.equal(
        OnnxRunner.from_checkpoint(config, out).run(pixels), OnnxRunner.from_checkpoint(config).run(pixels)
    )
    other = read_config(hf_native(tmp_path / "other", Shape(**SMALL), seed=1))
    with pytest.raises(ConfigError, match="exported from other weights"):
        OnnxRunner.from_checkpoint(other, out)
    with pytest.raises(ConfigError, match="does not exist"):
        OnnxRunner.from_checkpoint(config, tmp_path / "none.onnx")
    failed = run_script("check_export.py", "--checkpoint", tmp_path / "other", "--onnx", out)
    assert failed.returncode == 1
    assert "not exported from the weights" in failed.stderr


def test_check_export_names_the_layer_that_differs(checkpoint, tmp_path):
    spec = importlib.util.spec_from_file_location("check_export", BUILD / "check_export.py")
    check_export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_export)
    out = tmp_path / "model.onnx"
    run_script("export_vision_onnx.py", "--checkpoint", checkpoint, "--out", out)
    model = onnx.load(str(out))
    # Break the second layer's last addition: its update is left out.
    node = next(node for node in model.graph.node if node.output[0] == "layers.1")
    node.input[1] = node.input[0]
    onnx.save(model, str(out))
    result = check_export.check(checkpoint, out, 0.9999)
    assert not result["passed"]
    assert result["layers"]["layers.0"]["cosine"] > 0.9999 > result["layers"]["layers.1"]["cosine"]
