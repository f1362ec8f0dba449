"""Whole runs on tiny checkpoints of each layout and body: what is written, what stays, and a kill in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import quantize_fakes
import torch
from safetensors.torch import load_file

from tessera.checkpoint.weights import SafetensorsFolder
from tessera.errors import CheckpointError, ConfigError
from tessera.models.registry import read_config
from tessera.models.tower import stored_in_fp8
from tessera_quantize import report
from tessera_quantize.body import Body
from tessera_quantize.compressed import dequantized
from tessera_quantize.layer import LayerQuantizer, Recipe
from tessera_quantize.run import Job, finish, run
from tessera_quantize.samples import row_weights


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return quantize_fakes.labelled_folder(tmp_path_factory.mktemp("pictures"))


def made(job: Job) -> SafetensorsFolder:
    torch.set_num_threads(1)
    rows = run(job, quantize_fakes.quiet)
    report.write(job.work / job.recipe.method / "checkpoint" / "quantization", job, rows)
    finish(job)
    return SafetensorsFolder(job.out)


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


@pytest.mark.parametrize("body", quantize_fakes.BODIES)
@pytest.mark.parametrize("method", ["rtn", "gptq", "fp8"])
def test_each_linear_layer_of_the_body_is_quantized_and_nothing_else(tmp_path, pictures, body, method):
    source = quantize_fakes.checkpoint(tmp_path, body)
    folder = made(quantize_fakes.job(source, tmp_path / "out", pictures, method))
    before = weights(SafetensorsFolder(source))
    after = weights(folder)
    assert after.keys() == before.keys()
    quantized = {name.removesuffix(".weight_scale") for name in folder.names() if name.endswith(".weight_scale")}
    body_layers = {name.rpartition(".")[0] for name, each in before.items() if ".layers." in name and each.dim() == 2}
    assert quantized == {name for name in body_layers if name.startswith("language_model.")}
    for name, tensor in after.items():
        if name.removesuffix(".weight") in quantized:
            error = (tensor - before[name].float()).norm() / before[name].float().norm()
            assert 0 < error < (0.04 if method == "fp8" else 0.2)
        else:
            assert torch.equal(tensor, before[name])
    config = json.loads((folder.folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == ("float-quantized" if method == "fp8" else "pack-quantized")
    assert not {name.removeprefix("model.") for name in config["ignore"]} & quantized
    assert (folder.folder / "quantization" / "report.md").is_file()
    assert not quantize_fakes.job(source, folder.folder, pictures).work.exists()


def test_the_ignore_list_names_every_other_linear_module(tmp_path, pictures):
    for body, tower, head in (
        ("native qwen2", "model.vision_tower.encoder.layer.1.attention.q_proj", "lm_head"),
        ("chat internlm2", "vision_model.encoder.layers.1.attn.qkv", "language_model.output"),
    ):
        source = quantize_fakes.checkpoint(tmp_path / body, body)
        folder = made(quantize_fakes.job(source, tmp_path / body / "out", pictures, "rtn"))
        ignore = json.loads((folder.folder / "config.json").read_text())["quantization_config"]["ignore"]
        assert {tower, head} <= set(ignore) and len(ignore) == len(set(ignore))
        projector = "model.multi_modal_projector.linear_1" if "native" in body else "mlp1.1"
        assert projector in ignore and not any("embed" in name or "norm" in name for name in ignore)


@pytest.mark.parametrize("shape", [{}, {"text_kv_heads": 4}])
@pytest.mark.parametrize("body", ["native qwen2", "chat internlm2"])
def test_awq_s_scales_change_the_tensors_and_not_the_layer(tmp_path, pictures, monkeypatch, body, shape):
    """With nothing rounded afterwards; with as many key heads as heads, values take scales as well."""
    monkeypatch.setattr("tessera_quantize.layer.INPUTS", ())
    source = quantize_fakes.checkpoint(tmp_path, body, **shape)
    whole = Body(read_config(source), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 64, generator=generator) * torch.logspace(-1, 1, 64)
    sample = quantize_fakes.sample(hidden)
    quantizer = LayerQuantizer(whole, 0, Recipe("awq", 32), [sample])
    before = {name: each.clone() for name, each in quantizer._weights.items()}
    whole.load(whole.tensors(0))
    expected = whole.run(hidden, sample.positions)
    monkeypatch.setattr("tessera_quantize.layer.INPUTS", ("qkv", "output", "gate_up", "down"))
    quantizer._fold_scales()
    changed = {name for name, each in quantizer._weights.items() if not torch.equal(each, before[name])}
    kept = set() if shape and "qwen2" in body else {name for name in changed if name.endswith(("o_proj", "wo"))}
    assert len(changed) == len(before) - (0 if shape and "qwen2" in body else 1) and not kept
    quantizer._load()
    difference = whole.run(hidden, sample.positions) - expected
    assert difference.norm() < 0.01 * expected.norm()  # biases and norms are stored in bfloat16


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


KILLED = """
    import os, signal, sys
    from contextlib import contextmanager
    from pathlib import Path
    import torch
    import quantize_fakes
    from tessera_quantize.run import run

    torch.set_num_threads(1)
    done = 0

    @contextmanager
    def progress(what, steps):
        def advance():
            global done
            done += what.startswith("layers: awq")
            if done == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        yield advance

    run(quantize_fakes.job(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), "awq"), progress)
"""


def test_a_killed_run_goes_on_and_ends_in_the_same_bits(tmp_path, pictures):
    source = quantize_fakes.checkpoint(tmp_path, "native qwen2", text_layers=3)
    whole = made(quantize_fakes.job(source, tmp_path / "whole", pictures))
    arguments = [str(source), str(tmp_path / "out"), str(pictures)]
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), *arguments], env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert killed.returncode == -signal.SIGKILL
    job = quantize_fakes.job(source, tmp_path / "out", pictures)
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
    made(quantize_fakes.job(source, tmp_path / "fp8", pictures, "fp8"))
    with pytest.raises(ConfigError, match="quantized already"):
        run(quantize_fakes.job(tmp_path / "fp8", tmp_path / "again", pictures), quantize_fakes.quiet)


def test_pictures_and_words_count_half_each():
    found = row_weights(10, [range(2, 6), range(7, 8)])
    assert found[[2, 3, 4, 5, 7]].tolist() == pytest.approx([0.1] * 5)
    assert found[[0, 1, 6, 8, 9]].tolist() == pytest.approx([0.1] * 5)
    assert row_weights(12, [range(2, 10)])[[0, 2]].tolist() == pytest.approx([1 / 8, 1 / 16])
    assert row_weights(4, []).tolist() == pytest.approx([0.25] * 4)


def test_the_report_shows_every_row(tmp_path, pictures):
    source = quantize_fakes.checkpoint(tmp_path, "native llama")
    made(quantize_fakes.job(source, tmp_path / "out", pictures, "gptq", compare=True))
    page = (tmp_path / "out" / "quantization" / "report.md").read_text()
    figures = json.loads((tmp_path / "out" / "quantization" / "report.json").read_text())
    assert [row["name"] for row in figures["rows"]] == ["original", "gptq", "rtn", "gptq, words alone"]
    original, gptq, rtn, words = figures["rows"]
    assert original["kl"] == 0 and gptq["kl"] > 0 and original["bytes"] > gptq["bytes"]
    assert all(layer[name] < rtn["errors"][0][name] for layer in gptq["errors"][:1] for name in layer)
    assert gptq["errors"] != words["errors"]
    assert all(f"| {row['name']} |" in page for row in figures["rows"])
    assert (tmp_path / "out" / "quantization" / "errors.svg").read_text().count("<polyline") == 3
    stored = load_file(tmp_path / "out" / "model-00002-of-00003.safetensors")
    assert "language_model.model.layers.0.self_attn.q_proj.weight_packed" in stored
