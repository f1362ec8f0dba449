"""Checkpoints whose vision weights are stored in FP8, as compressed-tensors writes them, packed here by other code."""

import logging
import math
import re

import pytest
import torch
from models.tiny_families import write_paddleocr_vl
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, as_qianfan, hf_native
from tiny_qwen2_vl import QWEN2_5_VL, QWEN2_VL
from tiny_qwen2_vl_tower import config_of, model_of, save

from tessera.errors import CheckpointError, ConfigError
from tessera.kernels.tower_layers import Fp8Linear, gpu_kernels
from tessera.models.registry import read_config
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision import fp8_tower
from tessera.vision.fp8_tower import linears_in_fp8, serving_tower
from tessera.vision.onnx_runner import OnnxRunner
from tessera.vision.runner import load_runner
from tessera.vision.torch_runner import TorchRunner

SMALL = dict(image_size=56, patch_size=14)
E4M3 = torch.float8_e4m3fn
LINEARS = {
    "hf_native": r"vision_tower\..*(_proj|projection_layer|fc[12])\.weight|multi_modal_projector\.linear_[12]\.weight",
    "internvl_chat": r"vision_model\.encoder\..*(qkv|proj|fc[12])\.weight|mlp1\.[13]\.weight",
    "qianfan_ocr": r"vision_model\.encoder\..*(qkv|proj|fc[12])\.weight|mlp1\.[13]\.weight",
    "paddleocr_vl": r"visual\..*encoder.*([qkv]_proj|out_proj|fc[12])\.weight|mlp_AR\.linear_[12]\.weight",
    "qwen2_vl": r"model\.visual\.(blocks\..*(qkv|proj|fc[12])|merger\.mlp\.[02])\.weight",
    "qwen2_5_vl": r"model\.visual\.(blocks\..*(qkv|proj)|merger\.mlp\.[02])\.weight",  # gate_proj and so on
}


@pytest.fixture(params=LINEARS)
def folder(request, tmp_path):
    if request.param == "hf_native":
        return hf_native(tmp_path / "native", Shape(**SMALL))
    if request.param == "paddleocr_vl":
        write_paddleocr_vl(tmp_path / request.param, names="published")
        return tmp_path / request.param
    if request.param == "qianfan_ocr":
        return as_qianfan(hf_native(tmp_path / "native", Shape(text="qwen3", **SMALL)), tmp_path / request.param)
    for kind in (QWEN2_VL, QWEN2_5_VL):
        if request.param == kind.layout:
            save(model_of(kind=kind, depth=2), config_of(tmp_path / kind.layout, kind, depth=2).folder)
            return tmp_path / kind.layout
    return as_internvl_chat(hf_native(tmp_path / "native", Shape(text="llama", **SMALL)), tmp_path / "chat")


@pytest.fixture(autouse=True)
def short_gate(monkeypatch):
    """One picture of noise in place of four: what the gate shows a tower is test_fp8_tower.py's affair."""
    noise = torch.Generator().manual_seed(1)
    monkeypatch.setattr(
        fp8_tower, "gate_tiles", lambda shape: torch.randint(256, (1, *shape), generator=noise, dtype=torch.uint8)
    )


def store_in_fp8(folder, largest=448.0, dtype=torch.float32, only=r".*"):
    """Replaces the linear layers' weights in the file; ``largest``: the code of a row's largest value.

    Gives what is stored, by name, and leaves beside it a folder of the same values in float32.
    """
    tensors = load_file(folder / "model.safetensors")
    pattern = next(each for each in LINEARS.values() if any(re.fullmatch(each, name) for name in tensors))
    stored, exact = {}, dict(tensors)
    for name in [name for name in tensors if re.fullmatch(pattern, name) and re.fullmatch(only, name)]:
        weight = tensors.pop(name).float()
        scale = (weight.abs().amax(1, keepdim=True) / largest).to(dtype)
        stored[name] = (weight / scale.float()).clamp(-448, 448).to(E4M3)
        stored[f"{name}_scale"] = scale
        exact[name] = stored[name].float() * scale.float()
    save_file(tensors | stored, folder / "model.safetensors")
    plain = folder.with_name("plain")
    plain.mkdir()
    for path in folder.glob("*.json"):
        (plain / path.name).write_bytes(path.read_bytes())
    save_file(exact, plain / "model.safetensors")
    return stored, plain


def counting(shape):
    return torch.arange(2 * math.prod(shape)).remainder(251).to(torch.uint8).view(2, *shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_are_the_codes_times_their_scales(folder, dtype):
    stored, plain = store_in_fp8(folder, dtype=dtype)
    assert len(stored) == 2 * (2 * {"native": 6, "qwen2_5_vl": 5, "paddleocr_vl": 6}.get(folder.name, 4) + 2)
    found, expected = (load_tower(read_config(each)).state_dict() for each in (folder, plain))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("largest", [352.0, 3.5])
def test_dequantized_and_quantized_again_the_codes_are_the_same(folder, largest):
    """Layer scales of both signs folded into them included; whatever scale the maker took."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if re.search(r"lambda_[12]|ls[12]$", name):
            tensors[name] = torch.linspace(-1.7, 1.9, len(tensors[name])).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    store_in_fp8(folder, largest)
    config = read_config(folder)
    weights = load_tower(config).state_dict()
    served = serving_tower(config, VisionSettings("torch"))
    linears = {name: module for name, module in served.named_modules() if isinstance(module, Fp8Linear)}
    assert linears.keys() == load_tower(config).fp8_linears().keys()
    for name, layer in linears.items():
        again = layer.weight.float() * layer.scales[:, None]
        torch.testing.assert_close(again, weights[f"{name}.weight"], rtol=3e-7, atol=0, msg=name)


def test_it_linears_in_fp8_unless_the_device_cannot(folder, monkeypatch, caplog):
    store_in_fp8(folder)
    config = read_config(folder)
    runner, _ = load_runner(config, VisionSettings())  # onnx, which holds no such tower
    assert isinstance(runner, TorchRunner) and isinstance(runner.tower.projector.linear1, Fp8Linear)
    on_gpu = VisionSettings("graph", dtype="bfloat16", device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    for capability, runs in (((8, 0), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert bool(linears_in_fp8(config, on_gpu)) is runs
    assert not linears_in_fp8(config, VisionSettings("graph", dtype="float16", device="cuda"))
    assert not linears_in_fp8(config, VisionSettings("torch", random_weights=True))
    monkeypatch.setattr(fp8_tower, "LEAST_COSINE", 1.1)
    caplog.set_level(logging.WARNING)
    tower = serving_tower(config, VisionSettings("torch"))
    assert "it runs with its weights dequantized" in caplog.text
    assert not any(isinstance(module, Fp8Linear) for module in tower.modules())
    with pytest.raises(
        ConfigError, match=r"cosine with the unquantized tower's is 0\.\d+ .* must be 1\.1: set quantiz"
    ):
        serving_tower(config, VisionSettings("torch", quantization="fp8"))


def test_a_projector_left_as_it_was_stays_so(folder):
    """As `tessera quantize --vision fp8` writes it."""
    store_in_fp8(folder, only=r".*\.(layers?|blocks)\..*")
    config, settings = read_config(folder), VisionSettings("torch")
    tower = serving_tower(config, settings)
    linears = {name for name, module in tower.named_modules() if isinstance(module, Fp8Linear)}
    assert linears == {name for name in load_tower(config).fp8_linears() if name.startswith("layers.")}
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).repeat(
        1, tower.projector.linear1.in_features // 8
    )
    with torch.inference_mode():
        mixed = gpu_kernels(fp8=True).linear_and_activate(x, tower.projector.linear1, "gelu")
        torch.testing.assert_close(mixed, torch.nn.functional.gelu(tower.projector.linear1(x)))
        assert tower(*tower.squares(counting)).isfinite().all()


def test_where_only_some_layers_are_in_fp8_all_run_dequantized(folder):
    stored, plain = store_in_fp8(folder, only=r".*\.0\..*(fc1|down_proj).*|.*layer\.0.*fc1.*")
    assert len(stored) == 2
    runner, _ = load_runner(read_config(folder), VisionSettings())
    expected, _ = load_runner(read_config(plain), VisionSettings())
    assert isinstance(runner, OnnxRunner if runner.tower.splits else TorchRunner)
    pixels, wires = runner.tower.squares(counting)
    assert torch.equal(runner.run(pixels, wires), expected.run(pixels, wires))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scale"), "is stored as torch.float8_e4m3fn, which config.json"),
        (lambda tensors, name: tensors.update({name: torch.ones(1, 1)}), r"weight_scale: left over"),
        (lambda tensors, name: tensors.update({f"{name}_scale": torch.ones(3)}), "has 3 values for the"),
    ],
)
def test_weights_and_scales_that_do_not_belong_together_are_named(folder, change, message):
    stored, _ = store_in_fp8(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, next(name for name in stored if re.search("fc1|down_proj", name) and name.endswith("weight")))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_tower(read_config(folder))
