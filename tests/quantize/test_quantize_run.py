"""Whole runs on tiny checkpoints of each layout and body: what is written, what stays, and a kill in the middle."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import quantize_fakes
import torch

from tessera.checkpoint.weights import SafetensorsFolder
from tessera.engine.execution.model_runner import load_model
from tessera.errors import CheckpointError, ConfigError
from tessera.models.registry import read_config
from tessera.models.tower import stored_in_fp8
from tessera.settings.stages import EngineConfig
from tessera_quantize.body import Body
from tessera_quantize.checkpoint import dequantized
from tessera_quantize.methods import Recipe
from tessera_quantize.run import Job, LayerQuantizer, finish, run
from tessera_quantize.samples import row_weights


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return quantize_fakes.labelled_folder(tmp_path_factory.mktemp("pictures"))


def made(job: Job) -> SafetensorsFolder:
    return SafetensorsFolder(quantize_fakes.made(job))


def weights(folder: SafetensorsFolder) -> dict[str, torch.Tensor]:
    """All tensors, quantized ones as the weights that they stand for."""
    leaves: dict[str, dict[str, torch.Tensor]] = {}
    for name in folder.names():
        module, _, leaf = name.rpartition(".")
        leaves.setdefault(module, {})[leaf] = folder.get(name)
    found = {}
    for module, tensors in leaves.items():
        if "weight_scale" in tensors:
            found[f"{module}.weight"] = dequantized(tensors)
            tensors = {leaf: tensor for leaf, tensor in tensors.items() if leaf == "bias"}
        found |= {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
    return found


@pytest.mark.parametrize(
    ("body", "method"),
    [
        ("native qwen2", "gptq"),
        ("native llama", "rtn"),
        ("native qwen3", "fp8"),
        ("chat internlm2", "gptq"),
        ("chat qwen2", "fp8"),
        ("chat phi3", "rtn"),
        ("native qwen3_moe", "gptq"),
        ("native qwen3_moe", "awq"),
        ("chat qwen3_moe", "fp8"),
    ],
)
def test_each_linear_layer_of_the_body_is_quantized_and_nothing_else(tmp_path, pictures, body, method):
    source = quantize_fakes.checkpoint(tmp_path, body, text_mlp=128)
    folder = made(quantize_fakes.job(source, tmp_path / "out", pictures, method))
    before = weights(SafetensorsFolder(source))
    after = weights(folder)
    assert after.keys() == before.keys()
    quantized = {name.removesuffix(".weight_scale") for name in folder.names() if name.endswith(".weight_scale")}
    body_layers = {
        name.rpartition(".")[0]
        for name, each in before.items()
        if ".layers." in name and each.dim() == 2 and not name.endswith(".mlp.gate.weight")
    }
    assert quantized == {name for name in body_layers if name.startswith("language_model.")}
    for name, tensor in after.items():
        if name.removesuffix(".weight") in quantized and method != "awq":  # whose scales are folded into others
            error = (tensor - before[name].float()).norm() / before[name].float().norm()
            assert 0 < error < (0.04 if method == "fp8" else 0.2)
        elif method != "awq" or name.endswith(".mlp.gate.weight"):
            assert torch.equal(tensor, before[name])
    config = json.loads((folder.folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == ("float-quantized" if method == "fp8" else "pack-quantized")
    ignore, native = set(config["ignore"]), body.startswith("native")
    assert len(ignore) == len(config["ignore"]) and not {name.removeprefix("model.") for name in ignore} & quantized
    head = "lm_head" if native else f"language_model.{'output' if 'internlm2' in body else 'lm_head'}"
    layer = "model.vision_tower.encoder.layer.1.attention.q_proj", "vision_model.encoder.layers.1.attn.qkv"
    projector = "model.multi_modal_projector.linear_1", "mlp1.1"
    assert {layer[not native], projector[not native], head} <= ignore
    assert not any("embed" in name or "norm" in name for name in ignore)
    routers = {name.removesuffix(".weight") for name in before if name.endswith(".mlp.gate.weight")}
    assert len(routers) == 2 * ("moe" in body) == sum(name.endswith(".mlp.gate") for name in ignore)
    assert load_model(read_config(folder.folder), EngineConfig(threads=1)).describe_weights() != "float32"
    assert (folder.folder / "quantization" / "report.md").is_file()
    assert not quantize_fakes.job(source, folder.folder, pictures).work.exists()


@pytest.mark.parametrize("shape", [{}, {"text_kv_heads": 4}])
@pytest.mark.parametrize("body", ["native qwen2", "chat internlm2"])
def test_awq_s_scales_change_the_tensors_and_not_the_layer(tmp_path, pictures, monkeypatch, body, shape):
    """With nothing rounded afterwards; with as many key heads as heads, values take scales as well."""
    monkeypatch.setattr("tessera_quantize.run.INPUTS", ())
    source = quantize_fakes.checkpoint(tmp_path, body, **shape)
    whole = Body(read_config(source), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 64, generator=generator) * torch.logspace(-1, 1, 64)
    sample = quantize_fakes.sample(hidden)
    quantizer = LayerQuantizer(whole, 0, Recipe("awq", 32), [sample])
    before = {name: each.clone() for name, each in quantizer._weights.items()}
    whole.load(whole.tensors(0))
    expected = whole.run(hidden, sample.positions)
    monkeypatch.setattr("tessera_quantize.run.INPUTS", ("qkv", "output", "gate_up", "down"))
    quantizer._fold_scales()
    changed = {name for name, each in quantizer._weights.items() if not torch.equal(each, before[name])}
    kept = set() if shape and "qwen2" in body else {name for name in changed if name.endswith(("o_proj", "wo"))}
    assert len(changed) == len(before) - (0 if shape and "qwen2" in body else 1) and not kept
    quantizer._load()
    difference = whole.run(hidden, sample.positions) - expected
    assert difference.norm() < 0.01 * expected.norm()  # biases and norms are stored in bfloat16


def test_awq_s_scales_of_experts_change_the_tensors_and_not_the_layer(tmp_path, monkeypatch):
    """Those of the downs, folded into the ups; the norm before the experts is the router's too."""
    monkeypatch.setattr("tessera_quantize.run.INPUTS", ("qkv", "output", "gate_up", "down"))
    source = quantize_fakes.checkpoint(tmp_path, "native qwen3_moe", text_mlp=128)
    whole = Body(read_config(source), torch.float32, torch.device("cpu"))
    hidden = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)
    sample = quantize_fakes.sample(hidden)
    quantizer = LayerQuantizer(whole, 0, Recipe("awq", 32), [sample])
    before = {name: each.clone() for name, each in quantizer._weights.items()}
    whole.load(whole.tensors(0))
    expected = whole.run(hidden, sample.positions)
    quantizer._fold_scales()
    changed = {
        name.rpartition(".")[2] for name, each in quantizer._weights.items() if not torch.equal(each, before[name])
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "up_proj", "down_proj"}
    quantizer._load()
    difference = whole.run(hidden, sample.positions) - expected
    assert difference.norm() < 0.01 * expected.norm()


def test_the_vision_tower_in_fp8(tmp_path, pictures):
    source = quantize_fakes.checkpoint(tmp_path, "native qwen2")
    folder = made(quantize_fakes.job(source, tmp_path / "out", pictures, "rtn", vision_fp8=True))
    fp8 = {name for name in folder.names() if folder.get(name).dtype == torch.float8_e4m3fn}
    assert len(fp8) == 2 * 6 and all(".encoder.layer." in name for name in fp8)
    assert len(stored_in_fp8(read_config(folder.folder))) == 2 * 4  # and so the vision stage runs them
    config = json.loads((folder.folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {f"model.{name}" for name in fp8} == {
        f"{name}.weight" for name in config["config_groups"]["group_1"]["targets"]
    }
    assert not set(config["config_groups"]["group_1"]["targets"]) & set(config["ignore"])


@contextmanager
def killed(what: str, steps: int) -> Iterator[Any]:
    """Ends the run behind the second layer."""
    done = count(1)

    def advance() -> None:
        if what == "layers: awq" and next(done) == 2:
            raise KeyboardInterrupt

    yield advance


def test_a_killed_run_goes_on_and_ends_in_the_same_bits(tmp_path, pictures):
    source = quantize_fakes.checkpoint(tmp_path, "native qwen2", text_layers=3)
    whole = made(quantize_fakes.job(source, tmp_path / "whole", pictures))
    job = quantize_fakes.job(source, tmp_path / "out", pictures)
    with pytest.raises(KeyboardInterrupt):
        run(job, killed)
    left = sorted(job.work.glob("awq/*.safetensors"))
    assert [path.name for path in left] == ["layer-000.safetensors", "layer-001.safetensors"]
    times = [path.stat().st_mtime_ns for path in left]
    run(job, quantize_fakes.quiet)
    assert [path.stat().st_mtime_ns for path in left] == times, "finished layers were made again"
    finish(job)
    files = [*sorted(whole.folder.glob("*.safetensors")), whole.folder / "config.json"]
    assert len(files) == 5
    assert all(path.read_bytes() == (job.out / path.name).read_bytes() for path in files)


def test_what_does_not_fit_is_refused_by_name(tmp_path, pictures):
    source = quantize_fakes.checkpoint(tmp_path, "native qwen2", text_mlp=80)
    with pytest.raises(CheckpointError, match=r"groups of 32 do not divide the 80 columns of layer 0's mlp\.down_proj"):
        run(quantize_fakes.job(source, tmp_path / "out", pictures), quantize_fakes.quiet)
    with pytest.raises(ConfigError, match="run with other settings"):
        run(quantize_fakes.job(source, tmp_path / "out", pictures, "gptq"), quantize_fakes.quiet)
    with pytest.raises(ConfigError, match="exists"):
        run(quantize_fakes.job(source, pictures, pictures), quantize_fakes.quiet)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="quantized already"):
        run(quantize_fakes.job(source, tmp_path / "again", pictures), quantize_fakes.quiet)


def test_pictures_and_words_count_half_each():
    found = row_weights(10, [range(2, 6), range(7, 8)])
    assert found[[2, 3, 4, 5, 7]].tolist() == pytest.approx([0.1] * 5)
    assert found[[0, 1, 6, 8, 9]].tolist() == pytest.approx([0.1] * 5)
    assert row_weights(12, [range(2, 10)])[[0, 2]].tolist() == pytest.approx([1 / 8, 1 / 16])
    assert row_weights(4, []).tolist() == pytest.approx([0.25] * 4)
