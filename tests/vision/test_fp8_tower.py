"""A tower in FP8: as served on the CPU, and behind its gate."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.kernels.tower_layers import Fp8Linear
from tessera.models.registry import read_config
from tessera.models.tower import Tower
from tessera.settings.stages import VisionSettings
from tessera.vision import fp8_tower
from tessera.vision.fp8_tower import check_rows, gate_tiles, serving_tower
from tessera.vision.runner import load_runner
from tessera.vision.torch_runner import TorchRunner

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
FP8 = VisionSettings(quantization="fp8")
SMALL = Shape(image_size=56, patch_size=14)


def test_the_default_model_in_fp8_on_the_cpu(caplog):
    """The setting alone, with the runner of torch, since no graph holds it: e4m3's three bits are all that is lost."""
    caplog.set_level(logging.INFO)
    config = read_config(DEFAULT)
    runner, kept = load_runner(config, FP8)
    assert isinstance(runner, TorchRunner)
    tower = runner.tower
    linears = [name for name, module in tower.named_modules() if isinstance(module, Fp8Linear)]
    assert len(linears) == 4 * 4 + 2 and {"layers.3.mlp.linear2", "projector.linear1"} < {*linears}
    assert isinstance(tower.patch_embedding, torch.nn.Linear)
    assert kept < 0.5 * load_runner(config, replace(FP8, quantization="checkpoint"))[1]
    torch.manual_seed(0)
    given = torch.cat((gate_tiles(tower.unit_shape), torch.randint(0, 256, (1, 448, 448, 3)).to(torch.uint8)))
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch")).run(given)
    found = torch.nn.functional.cosine_similarity(runner.run(given).double(), plain.double(), dim=-1)
    assert found.mean() > 0.993 and 0.96 < found.min() < 0.999
    assert "the vision tower runs in FP8: cosine with the unquantized rows 0.99" in caplog.text


def test_a_linear_layer_of_the_tower_computes_what_fake_quantization_does(tmp_path):
    """Weights rounded by channel, what goes in by row, float32 products: spelt out for one layer's qkv."""
    config = read_config(hf_native(tmp_path, SMALL))
    plain, quantized = (serving_tower(config, VisionSettings("torch", quantization=q)) for q in ("checkpoint", "fp8"))
    x = torch.randn(17, 32, generator=torch.Generator().manual_seed(1))

    def rounded(rows):
        scale = rows.abs().amax(1, keepdim=True) / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    linear = plain.blocks[1].attention.qkv
    expected = rounded(x) @ rounded(linear.weight).T + linear.bias
    torch.testing.assert_close(quantized.blocks[1].attention.qkv(x), expected, rtol=1e-5, atol=1e-5)


def test_the_gate_judges_the_average_row_and_refuses_what_is_no_number():
    rows = torch.ones(125, 8)
    odd = rows.clone()
    odd[0, :4] = -1  # at a right angle
    check_rows(odd, rows, "FP8")
    odd[1, :4] = -1
    with pytest.raises(ConfigError, match=r"is 0\.9840 on average \(least 0\.0000\)"):
        check_rows(odd, rows, "FP8")
    with pytest.raises(ConfigError, match="is nan on average"):
        check_rows(rows * float("nan"), rows, "FP8")


def test_the_gates_tiles_are_pictures():
    """None empty, none like another, neighbours alike as in pictures and unlike noise; the same at every start."""
    found = gate_tiles((448, 448, 3))
    assert found.shape == (4, 448, 448, 3) and found.dtype == torch.uint8
    assert torch.equal(found, gate_tiles((448, 448, 3)))
    wide = found.float()
    steps = (wide[:, :, 1:] - wide[:, :, :-1]).abs().mean((1, 2, 3)) / wide.std((1, 2, 3))
    assert wide.std((1, 2, 3)).min() > 5 and steps.max() < 0.5
    assert gate_tiles((56, 56, 3)).shape == (4, 56, 56, 3)


class TowerOfOtherLayers(Tower):
    pass


@pytest.mark.parametrize(
    ("capability", "settings", "vision", "message"),
    [
        ((8, 0), {}, {}, "is fp8, and some card has no FP8 units: set quantization to checkpoint or fp8-language"),
        ((9, 0), {"dtype": "float16"}, {}, "dtype is float16, while FP8 products"),
        ((9, 0), {}, {"intermediate_size": 40}, r"layers\.0\.mlp\.linear1 is 40 x 32, of which 16 is no divisor"),
        (None, {"runner": "torch", "device": "cpu"}, {}, "TowerOfOtherLayers does not run in FP8"),
    ],
)
def test_what_cannot_run_in_fp8_is_refused_by_name(tmp_path, monkeypatch, capability, settings, vision, message):
    config = read_config(hf_native(tmp_path, SMALL))
    config = replace(config, vision=replace(config.vision, **vision))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    if not capability:
        monkeypatch.setattr(fp8_tower, "load_tower", lambda *_, **__: TowerOfOtherLayers())
    on_gpu = VisionSettings("graph", dtype="bfloat16", device="cuda", quantization="fp8")
    with pytest.raises(ConfigError, match=message):
        serving_tower(config, replace(on_gpu, **settings))
