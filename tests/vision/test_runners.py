"""The runners against each other, and the exported file against the checkpoint it came from."""

import json
import os
from dataclasses import replace

import check_graph
import export_graph
import numpy as np
import onnx
import pytest
import torch
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl_tower import config_of

from tessera.errors import CheckpointError, ConfigError
from tessera.kernels import tower_attention
from tessera.kernels.tower_attention import attend
from tessera.models.internvl.onnx_graph import vision_graph
from tessera.models.registry import read_config
from tessera.models.tower import load_tower, onnx_writer
from tessera.settings import stages
from tessera.settings.stages import VisionSettings
from tessera.settings.user_cache import remove_unused, write_whole
from tessera.vision import onnx_runner
from tessera.vision.encoder import VisionEncoder
from tessera.vision.onnx_runner import OnnxRunner, graph_path
from tessera.vision.runner import make_runner
from tessera.vision.torch_runner import TorchRunner

SMALL = dict(image_size=56, patch_size=14)
SHAPES = {
    "plain": {},
    "rms_norm": dict(norm_type="rms_norm", qk_norm=True),
    "no bias, an earlier layer": dict(attention_bias=False, feature_layer=-2),
    "final norm": dict(mean_pooling=False),
    **{name: dict(hidden_act=name) for name in ("gelu_pytorch_tanh", "quick_gelu", "relu", "silu")},
    "pixels shuffled as in v1": dict(text="llama"),
}


TILE = np.zeros((1, 56, 56, 3), np.uint8)


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
    expected, typed = TorchRunner(tower).run(pixels), export_graph.tensorrt_graph(tower, precision="float32")
    for model in (vision_graph(tower), typed):
        rows = OnnxRunner(check_graph.for_cpu(model).SerializeToString()).run(pixels)
        torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)
    onnx.checker.check_model(typed, full_check=True)
    assert {node.domain for node in typed.graph.node} == {""}


def test_threads_take_tiles_of_their_own(checkpoint, monkeypatch):
    model, pixels = vision_graph(load_tower(read_config(checkpoint))).SerializeToString(), tiles(5)
    expected, runner = OnnxRunner(model).run(pixels), OnnxRunner(model, threads=2)
    for count, unused in ((1, "_single"), (5, "_shared")):
        with monkeypatch.context() as patched:
            patched.setattr(runner, unused, None)
            torch.testing.assert_close(runner.run(pixels[:count]), expected[: count * len(expected) // 5])
    monkeypatch.setattr(onnx_runner, "_HELD_TWICE", 0)
    large = OnnxRunner(model, threads=2)
    assert large._single is large._shared and (large.at_once, runner.at_once) == (1, 4)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_torch_deals_tiles_out_among_threads(checkpoint, monkeypatch, count):
    tower, pixels = load_tower(read_config(checkpoint), torch.bfloat16), tiles(count)
    expected, seen = TorchRunner(tower).run(pixels), []
    runner = TorchRunner(tower, threads=2)
    forward = runner._forward
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)  # which tests are kept from
    monkeypatch.setattr(
        runner,
        "_forward",
        lambda part, wires: seen.append((len(part), torch.get_num_threads())) or forward(part, wires),
    )
    for _ in range(2):  # threads keep their numbers, whatever others set
        seen.clear()
        torch.testing.assert_close(runner.run(pixels), expected)
        assert sorted(seen) == {1: [(1, 2)], 2: [(1, 1), (1, 1)], 5: [(2, 1), (3, 1)]}[count]
    torch.set_num_threads(1)
    assert runner.at_once == 4


@pytest.mark.parametrize(("tokens", "most"), [(3, 1 << 21), (40, 40 * 40 * 3), (40, 1)])
def test_scores_that_are_written_out_are_those_of_attention(tokens, most, monkeypatch):
    monkeypatch.setattr(tower_attention, "MOST_SCORES", most)  # of all heads, of three of the four, of none
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 2, tokens, 2, 8, generator=generator).bfloat16()
    torch.testing.assert_close(attend(*rows), attend(*rows.float()).bfloat16(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("given", "native", "tiles", "found"),
    [
        ({}, True, True, "float32"),
        ({"dtype": "auto"}, False, True, "float32"),
        ({"dtype": "auto"}, True, True, "bfloat16"),
        ({"dtype": "auto"}, True, False, "float32"),
        ({"dtype": "auto", "quantization": "int8"}, True, True, "float32"),
        ({"dtype": "auto", "device": "cuda", "runner": "graph"}, False, False, "bfloat16"),
        ({"dtype": "float16"}, False, True, "float16"),
    ],
    ids=str,
)
def test_the_cpu_computes_tiles_in_bfloat16_where_it_can(given, native, tiles, found, checkpoint, monkeypatch):
    monkeypatch.setattr(stages, "multiplies_bfloat16", lambda: native)
    settings = VisionSettings(**given)
    assert settings.in_dtype(tiles).dtype == found
    if tiles and settings.quantization == "checkpoint":
        runner = VisionEncoder.from_checkpoint(checkpoint, settings).runner
        assert isinstance(runner, OnnxRunner if found == "float32" else TorchRunner)
        assert f"{runner.run(TILE).dtype}" == f"torch.{found}"


@pytest.mark.parametrize(("flags", "native"), [("fpu avx512f avx512_bf16", True), ("fpu avx512f bf16x", False)])
def test_what_the_cpu_multiplies_is_read_from_its_flags(flags, native, monkeypatch):
    monkeypatch.setattr(stages.Path, "read_text", lambda self: f"processor : 0\nflags : {flags}\n")
    assert stages.multiplies_bfloat16.__wrapped__() == native


def test_export_check_and_use(checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "model.onnx"
    assert export_graph.main(["--checkpoint", str(checkpoint), "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    capsys.readouterr()
    assert check_graph.main(["--checkpoint", str(checkpoint), "--onnx", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["cosine"] >= 0.9999
    expected = start(checkpoint).run(tiles(2))
    assert torch.equal(OnnxRunner(out).run(tiles(2)), expected)
    hf_native(tmp_path / "other", Shape(**SMALL), seed=1)
    with pytest.raises(CheckpointError, match="not exported from the weights"):
        check_graph.check(tmp_path / "other", out)
    # The layer that differs is named: of the second's last addition the update is left out.
    model = onnx.load(out)
    node = next(node for node in model.graph.node if node.output[0] == "layers.1")
    node.input[1] = node.input[0]
    onnx.save(model, str(out))
    assert check_graph.main(["--checkpoint", str(checkpoint), "--onnx", str(out)]) == 1
    assert "the first tensor below it is layers.1" in capsys.readouterr().err


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


INT8 = VisionSettings(quantization="int8")


def start(checkpoint, settings=VisionSettings()):  # noqa: B008 - frozen
    return OnnxRunner.from_checkpoint(read_config(checkpoint), settings)


def test_the_graph_is_exported_on_first_use_and_kept(checkpoint, cache, tmp_path, monkeypatch):
    """Other weights, and other code, have another; an old one of the same weights goes once nobody uses it."""
    first = start(checkpoint).run(tiles(2))
    (kept,) = cache.iterdir()
    os.utime(kept, (0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(onnx_runner, "load_tower", lambda *_, **__: pytest.fail("exported again"))
        assert torch.equal(start(checkpoint).run(tiles(2)), first)
    remove_unused([kept])
    assert [*cache.iterdir()] == [kept]  # it is used
    other = start(hf_native(tmp_path / "other", Shape(**SMALL), seed=1)).run(tiles(2))
    known = {*cache.iterdir()}
    assert len(known) == 2 and not torch.equal(other, first)
    (changed := tmp_path / "internvl" / "onnx_graph.py").parent.mkdir()
    monkeypatch.setattr(onnx_runner.towers, "__file__", str(tmp_path / "tower.py"))
    before = graph_path("a tower's")
    changed.write_text("# changed")
    assert graph_path("a tower's") != before
    start(checkpoint)
    assert len([*cache.iterdir()]) == 3 and kept.exists()  # a process of that version may be about to read it
    os.utime(kept, (0, 0))
    ({*cache.iterdir()} - known).pop().unlink()
    start(checkpoint)
    assert len([*cache.iterdir()]) == 2 and not kept.exists()


def test_drafts_of_killed_and_of_failed_writers_go(tmp_path, monkeypatch):
    """A file is on the disk before it has its name: else a machine that loses power may keep that of an empty one."""
    old, new = (tmp_path / f"graph.onnx.{digit * 32}.draft" for digit in "ab")
    for path in (old, new, others := tmp_path / "graph.onnx.bak"):
        path.touch()
    for path in (old, others):
        os.utime(path, (0, 0))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "graph.onnx").exists()))
    write_whole(tmp_path / "graph.onnx", lambda draft: draft.write_bytes(b"whole"))
    assert {*tmp_path.iterdir()} == {tmp_path / "graph.onnx", new, others} and synced[0] is False

    def fail(draft):
        draft.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "graph.onnx", fail)
    assert {*tmp_path.iterdir()} == {tmp_path / "graph.onnx", new, others}


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


def in_int8(tower):
    """The tower with its linear layers' weights and inputs rounded as the graph's are, in float32."""

    def rounded(module, inputs):
        (x,) = inputs
        low, high = x.min().clamp(max=0), x.max().clamp(min=0)
        scale = (high - low) / 255
        zero = (-low / scale).round()
        return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale

    for name, layer in tower.named_modules():
        if isinstance(layer, torch.nn.Linear):
            scales = layer.weight.abs().amax(1, keepdim=True) / 63
            weight = (layer.weight / scales).round() * scales
            if name == "patch_embedding":  # of pixels less 128
                layer.bias += 128 * (layer.weight - weight).sum(1)
            else:
                layer.register_forward_pre_hook(rounded)
            layer.weight.copy_(weight)
    return tower


@pytest.mark.parametrize("shape", ["plain", "no bias, an earlier layer"])
def test_in_int8_weights_and_inputs_are_rounded_and_a_tile_does_not_see_its_neighbours(tmp_path, cache, shape):
    folder = hf_native(tmp_path / "tiny", Shape(**SMALL, **SHAPES[shape]))
    config, pixels = read_config(folder), tiles(3)
    plain = TorchRunner(load_tower(config))
    with torch.no_grad():
        expected = torch.cat([TorchRunner(in_int8(load_tower(config))).run(tile[None]) for tile in pixels])
    runner = start(folder, INT8)
    found = runner.run(pixels)
    # A value between two steps may take either, by the order of sums before it.
    error, of_rounding = (found - expected).norm(), (found - plain.run(pixels)).norm()
    assert error < 0.1 * of_rounding and of_rounding < 0.1 * expected.norm()
    assert torch.equal(runner.run(pixels[1:2]), found[4:8])
    assert [path.name[:12] for path in cache.iterdir()] == ["vision-int8-"]


def test_int8_is_refused_where_it_changes_the_rows_or_no_graph_holds_the_tower(checkpoint, cache, monkeypatch):
    with pytest.raises(ConfigError, match="int8-vision is the CPU's"):
        replace(INT8, runner="torch")
    monkeypatch.setattr(onnx_runner, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="no ONNX graph holds this InternViT"):
        make_runner(read_config(checkpoint), INT8)
    monkeypatch.setattr("tessera.vision.fp8_tower.LEAST_COSINE", 1.1)
    with pytest.raises(ConfigError, match="the vision tower in int8 gives other rows"):
        start(checkpoint, INT8)
    assert not cache.exists()
