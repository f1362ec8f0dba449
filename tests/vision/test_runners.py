"""The runners against each other, and the exported file against the checkpoint it came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import check_graph
import numpy as np
import onnx
import pytest
import torch
from check_graph import for_cpu
from export_graph import tensorrt_graph
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl_tower import config_of

from tessera.errors import CheckpointError, ConfigError
from tessera.models.internvl.onnx_graph import vision_graph
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, onnx_writer, vision_fingerprint
from tessera.settings.stages import VisionSettings
from tessera.settings.user_cache import remove_unused, write_whole
from tessera.vision import onnx_runner
from tessera.vision.encoder import VisionEncoder
from tessera.vision.onnx_runner import OnnxRunner, kept_graph
from tessera.vision.pictures import VisionItem
from tessera.vision.runner import make_runner
from tessera.vision.torch_runner import TorchRunner

BUILD = Path(__file__).resolve().parents[2] / "build" / "vision"
SMALL = dict(image_size=56, patch_size=14)
SHAPES = {
    "plain": {},
    "rms_norm": dict(norm_type="rms_norm", qk_norm=True),
    "no bias, an earlier layer": dict(attention_bias=False, feature_layer=-2),
    "final norm": dict(mean_pooling=False),
    **{name: dict(hidden_act=name) for name in ("gelu_pytorch_tanh", "quick_gelu", "relu", "silu")},
    "pixels shuffled as in v1": dict(text="llama"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_native(tmp_path_factory.mktemp("tiny") / "checkpoint", Shape(**SMALL))


def tiles(count, side=56, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graph_computes_what_torch_does(tmp_path, shape):
    folder = hf_native(tmp_path / "native", Shape(**SMALL, **SHAPES[shape]))
    if shape.startswith("pixels"):
        folder = as_internvl_chat(folder, tmp_path / "chat", ps_version="v1")
    tower, pixels = load_tower(read_config(folder)), tiles(3)
    expected, typed = TorchRunner(tower).run(pixels), tensorrt_graph(tower, precision="float32")
    for model in (vision_graph(tower), typed):
        rows = OnnxRunner(for_cpu(model).SerializeToString()).run(pixels)
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)
    onnx.checker.check_model(typed, full_check=True)
    assert {node.domain for node in typed.graph.node} == {""}


def test_bfloat16_stays_near_float32(checkpoint):
    config, pixels = read_config(checkpoint), tiles(2)
    wide, narrow = (
        TorchRunner.from_checkpoint(config, VisionSettings(runner="torch", dtype=dtype)).run(pixels)
        for dtype in ("float32", "bfloat16")
    )
    assert narrow.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(wide, narrow.float(), dim=-1).min() > 0.999


def test_random_weights_need_no_weights_and_repeat(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    settings = VisionSettings(random_weights=True)
    item = VisionItem(tiles(1).ravel(), np.array([0, 1, 1, 1], np.int32), np.array([1, 2], np.int64))
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
    exported = run_script("export_graph.py", "--checkpoint", checkpoint, "--out", out)
    assert exported.returncode == 0, exported.stderr
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    checked = run_script("check_graph.py", "--checkpoint", checkpoint, "--onnx", out)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["cosine"] >= 0.9999
    expected = OnnxRunner.from_checkpoint(read_config(checkpoint), VisionSettings()).run(tiles(2))
    assert torch.equal(OnnxRunner(out).run(tiles(2)), expected)
    hf_native(tmp_path / "other", Shape(**SMALL), seed=1)
    with pytest.raises(CheckpointError, match="not exported from the weights"):
        check_graph.check(tmp_path / "other", out)


def test_check_graph_names_the_layer_that_differs(checkpoint, tmp_path):
    tower = load_tower(read_config(checkpoint))
    model = vision_graph(tower, vision_fingerprint(read_config(checkpoint)))
    # Break the second layer's last addition: its update is left out.
    node = next(node for node in model.graph.node if node.output[0] == "layers.1")
    node.input[1] = node.input[0]
    onnx.save(model, str(tmp_path / "model.onnx"))
    result = check_graph.check(checkpoint, tmp_path / "model.onnx")
    assert not result["passed"]
    assert result["layers"]["layers.0"]["cosine"] > 0.9999 > result["layers"]["layers.1"]["cosine"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(checkpoint):
    return OnnxRunner.from_checkpoint(read_config(checkpoint), VisionSettings())


def test_the_graph_is_exported_on_first_use_and_kept(checkpoint, cache, monkeypatch):
    first = start(checkpoint).run(tiles(2))
    (kept,) = cache.iterdir()
    os.utime(kept, (0, 0))
    monkeypatch.setattr(onnx_runner, "load_tower", lambda *_, **__: pytest.fail("exported again"))
    assert torch.equal(start(checkpoint).run(tiles(2)), first)
    remove_unused([kept])
    assert [*cache.iterdir()] == [kept]  # it is used
    os.utime(kept, (0, 0))
    remove_unused([kept])
    assert not kept.exists()


def test_other_weights_or_other_code_are_another_graph(checkpoint, cache, tmp_path, monkeypatch):
    (first,) = (start(checkpoint), *cache.iterdir())[1:]
    other = start(hf_native(tmp_path / "other", Shape(**SMALL), seed=1)).run(tiles(2))
    known = [*cache.iterdir()]
    assert len(known) == 2 and not torch.equal(other, start(checkpoint).run(tiles(2)))
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "tower.py").write_text("# changed")
    monkeypatch.setattr(onnx_runner.towers, "__file__", str(newer / "tower.py"))
    start(checkpoint)
    assert len([*cache.iterdir()]) == 3 and first.exists()  # a process of that version may be about to read it
    os.utime(first, (0, 0))
    next(path for path in cache.iterdir() if path not in known).unlink()
    start(checkpoint)
    assert len([*cache.iterdir()]) == 2 and not first.exists()  # nobody has used it for long


def test_drafts_of_killed_and_of_failed_writers_go(tmp_path):
    old, new = (tmp_path / f"graph.onnx.{digit * 32}.draft" for digit in "ab")
    for path in (old, new, others := tmp_path / "graph.onnx.bak"):
        path.touch()
    for path in (old, others):
        os.utime(path, (0, 0))
    write_whole(tmp_path / "graph.onnx", lambda draft: draft.write_bytes(b"whole"))
    assert {*tmp_path.iterdir()} == {tmp_path / "graph.onnx", new, others}

    def fail(draft):
        draft.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "graph.onnx", fail)
    assert {*tmp_path.iterdir()} == {tmp_path / "graph.onnx", new, others}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a machine that loses power may keep the name of an empty file."""
    synced = []

    def sync(descriptor):
        assert not (tmp_path / "graph.onnx").exists()
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    write_whole(tmp_path / "graph.onnx", lambda draft: draft.write_bytes(b"whole"))
    assert synced == [(tmp_path / "graph.onnx").stat().st_ino]


def test_two_processes_may_export_at_once(checkpoint, cache):
    """The second begins while the first is half done, and finishes first; nobody reads half a file."""
    seen = []

    def write_slowly(draft):
        draft.write_bytes(b"half")
        seen.append(start(checkpoint).run(tiles(2)))
        draft.write_bytes(next(cache.glob("*.onnx")).read_bytes())

    graph = kept_graph(read_config(checkpoint))
    graph.unlink()
    write_whole(graph, write_slowly)
    assert torch.equal(start(checkpoint).run(tiles(2)), seen[0])
    assert [*cache.iterdir()] == [graph]


def test_without_a_place_for_it_the_graph_is_exported_every_time(checkpoint, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "file" / "below"))
    assert start(checkpoint).run(tiles(1)).shape == (4, 64)
    assert "the exported vision graph is not kept" in caplog.text


def test_a_tower_too_large_for_a_graph_runs_in_torch(checkpoint, monkeypatch):
    monkeypatch.setattr(onnx_runner, "MOST_BYTES", 1000)
    assert isinstance(make_runner(read_config(checkpoint), VisionSettings()), TorchRunner)


def test_a_tower_without_a_graph_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model_type 'qwen2_vl' has no ONNX graph: it runs in torch"):
        onnx_writer(config_of(tmp_path))
