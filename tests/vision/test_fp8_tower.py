"""A tower in FP8: as served on the CPU, by its faster kernels, and behind its gate."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, hf_native

from tessera.errors import ConfigError
from tessera.kernels.fp8_rows import E4M3, Fp8Rows
from tessera.kernels.tower_layers import Fp8Linear, gpu_kernels
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


def tiles(count, side, seed=0):
    return torch.randint(0, 256, (count, side, side, 3), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def cosine(rows, expected):
    return torch.nn.functional.cosine_similarity(rows.double(), expected.double(), dim=-1)


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
    held = sum(each.nbytes for each in (*tower.parameters(), *tower.buffers()))
    assert held <= kept <= 1.02 * held < 0.5 * load_runner(config, replace(FP8, quantization="checkpoint"))[1]
    given = torch.cat((gate_tiles(tower.unit_shape), tiles(1, 448)))
    found = cosine(runner.run(given), TorchRunner.from_checkpoint(config, VisionSettings("torch")).run(given))
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


@pytest.mark.parametrize(
    "shape",
    [
        replace(SMALL, hidden_act="gelu_pytorch_tanh"),
        Shape(image_size=56, patch_size=14, norm_type="rms_norm", qk_norm=True, hidden_act="silu"),
    ],
    ids=["layer_norm", "rms_norm"],
)
def test_a_tower_of_faster_kernels_gives_the_same_rows(tmp_path, shape, monkeypatch):
    pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")
    from tessera.kernels import tower_layers

    if not torch.cuda.is_available():  # the interpreter's cast to e4m3 loses carries: torch does it
        monkeypatch.setattr("tessera.kernels.fp8_rows.ROWS_DTYPE", torch.float32)
        product = tower_layers.fp8_linear
        cast = lambda rows, *rest: product(Fp8Rows(rows.values.to(E4M3), rows.scales), *rest)  # noqa: E731
        monkeypatch.setattr(tower_layers, "fp8_linear", cast)
    tower = serving_tower(read_config(hf_native(tmp_path, shape)), VisionSettings("torch", quantization="fp8"))
    given = tiles(2, 56)
    with torch.inference_mode():
        assert (
            cosine(tower(given, kernels=gpu_kernels(fp8=True)), tower(given)).min() > 0.9998
        )  # float32 but for its last bits, and the steps of e4m3 that those decide


def outlier(folder):
    """One channel of each first norm a million times the others, which the matrices after it take back."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("vision_tower") and "layernorm_before" in name:
            tensor[0] *= 1e6
        elif name.startswith("vision_tower") and "attention" in name and name.endswith("_proj.weight"):
            tensor[:, 0] *= 1e-6
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_tower_that_fp8_spoils_is_refused(tmp_path):
    """Rows with a channel so large that nothing is left of the others."""
    config = read_config(outlier(hf_native(tmp_path, SMALL)))
    given = tiles(2, 56)
    plain = TorchRunner.from_checkpoint(config, VisionSettings("torch")).run(given)
    assert plain.isfinite().all()
    message = (
        r"their cosine with the unquantized tower's is 0\.\d+ on average \(least -?0\.\d+\) and must be 0\.99: set"
    )
    with pytest.raises(ConfigError, match=message):
        load_runner(config, FP8)


def test_the_gate_judges_the_average_row_and_refuses_what_is_no_number():
    rows = torch.ones(125, 8)
    odd = rows.clone()
    odd[0, :4] = -1  # at a right angle
    check_rows(odd, rows)
    odd[1, :4] = -1
    with pytest.raises(ConfigError, match=r"is 0\.9840 on average \(least 0\.0000\)"):
        check_rows(odd, rows)
    with pytest.raises(ConfigError, match="is nan on average"):
        check_rows(rows * float("nan"), rows)


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
