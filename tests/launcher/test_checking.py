"""What is said of a checkpoint before a server is started: by the stages' readers, from headers alone."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Shape, as_internvl_chat, hf_native
from tiny_qwen2_vl import write_model

from tessera.checkpoint.weights import SafetensorsHeaders
from tessera.errors import CheckpointError
from tessera.launcher import checking
from tessera.launcher.cli import parse, serve_main
from tessera.launcher.settings import ServerSetup
from tessera.models.internvl.vision import InternViT
from tessera.settings.gpu import GIB, divide
from tessera.settings.stages import EngineConfig, VisionSettings

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
Change = Callable[[Path], object]


def setup_of(folder: Path, *flags: str) -> ServerSetup:
    options = parse(["--model-repository", str(REPOSITORY), "--checkpoint", str(folder), "--device", "cpu", *flags])[0]
    return options.set_up()


def judge(folder: Path, *flags: str) -> str:
    return checking.judge(setup_of(folder, *flags))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_native(tmp_path / "checkpoint", Shape())


def test_a_good_checkpoint_is_described(folder: Path, tmp_path: Path) -> None:
    said = judge(folder)
    for words in ("can be served on cpu", "hf_native", "InternViT", "Qwen2ForCausalLM, 2 layers, not quantized",
                  "a context of 4,096 tokens", "the weights take 1 MiB of memory"):  # fmt: skip
        assert words in said, said
    assert "\n" not in said
    chat = as_internvl_chat(hf_native(tmp_path / "llama", Shape(text="llama")), tmp_path / "chat")
    assert "InternLM2ForCausalLM" in judge(chat)
    write_model(tmp_path / "qwen2_vl")
    assert "Qwen2ViT" in judge(tmp_path / "qwen2_vl")


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file({name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")

    return apply


def config(change: Callable[[dict], object]) -> Change:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        change(raw)
        (folder / "config.json").write_text(json.dumps(raw))

    return apply


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def two_faults(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    tensors(lambda t: t.update(odd=torch.ones(1)))(folder)


INT8 = torch.int8
Q, FC = "language_model.model.layers.1.self_attn.q_proj", "vision_tower.encoder.layer.0.mlp.fc1"
MORE = "language_model.model.layers.7.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (config(lambda raw: raw["text_config"].update(hidden_act="gelu")), "text model's hidden_act 'gelu' is not"),
        *((config(lambda raw, odd=odd: raw["text_config"].update(head_dim=odd)),
           f"text model's head_dim must be a positive whole number, not {odd!r}") for odd in ("x", 0, True)),
        (config(lambda raw: raw.update(architectures=17)), "its files hold what was not expected there .TypeError"),
        (two_faults, "has no tokenizer.*; also: [^;]*1 weights are not known [^;]*$"),  # each of them once
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (tensors(lambda t: t.update({f"{Q}.bias": t[f"{Q}.bias"][:-1]})), rf" {Q}\.bias: has shape \[63\], expec"),
        (tensors(lambda t: t.update({f"{FC}.weight": t[f"{FC}.weight"].to(INT8)})), f" {FC}.weight: is stored"),
        (tensors(lambda t: t.pop(f"{Q}.weight")), f" {Q}.weight: missing"),
        (tensors(lambda t: t.pop(f"{FC}.bias")), f" {FC}.bias: missing"),
        (tensors(lambda t: t.update({MORE: t[f"{Q}.bias"].clone()})), f" {MORE}: left over"),
        (tensors(lambda t: t.update({f"{Q}.qweight": torch.ones(1, dtype=INT8)})), f"{Q} holds .* no quantization"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights: put"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "pickle"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs..."), "git lfs pull"),
        (cut, "not a safetensors file, or not all of one"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% bad"), "chat template"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_paragraph(folder: Path, change: Change, complaint: str) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        judge(folder)
    assert str(caught.value).startswith(f"{folder} cannot be served: ") and "\n" not in str(caught.value)


def test_settings_are_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="max_model_len 8000 exceeds the checkpoint's context of 4096"):
        judge(folder, "--set", "max_model_len=8000")
    assert "made FP8 while it loads" in judge(folder, "--quantization", "fp8-language")
    assert "can be served" in judge(folder, "--quantization", "int8-vision")
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="has no ONNX graph"):
        patched.setattr(InternViT, "onnx_graph", None)
        judge(folder, "--quantization", "int8-vision")
    (folder / "model.safetensors").unlink()
    assert "weights drawn at random" in judge(folder, "--set", "weights=random")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        judge(folder, "--only", "vision_encoder")


def test_serve_ends_with_the_paragraph_before_a_server_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model-repository", str(REPOSITORY), "--checkpoint", str(folder), "--device", "cpu"]
    assert serve_main([*flags, "--check"]) == 0 and "can be served on cpu" in capsys.readouterr().out
    tensors(lambda t: t.pop(f"{Q}.weight"))(folder)
    assert serve_main(flags) == 1
    said, (line,) = (text.splitlines() for text in capsys.readouterr())
    assert said == [] and line.startswith(f"tessera: {folder} cannot be served: ") and "q_proj.weight: missing" in line


def test_a_check_that_fails_itself_is_told_and_stops_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking.sys, "executable", shutil.which("false"))
    assert checking.fault(setup_of(folder)) is None
    assert "was not checked before the start: exit code 1" in capsys.readouterr().err


def test_what_was_found_good_is_checked_again_when_files_or_settings_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def run(command: object, input: bytes, **how: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess([], 0, b'"bad"\n' if (folder / "bad").exists() else b"null\n")

    monkeypatch.setattr(checking.subprocess, "run", run)
    assert [checking.fault(setup_of(folder)) for _ in range(2)] == [None, None] and len(asked) == 1
    assert checking.fault(setup_of(folder, "--set", "threads=2")) is None and len(asked) == 2
    (folder / "bad").touch()
    assert [checking.fault(setup_of(folder)) for _ in range(2)] == ["bad", "bad"] and len(asked) == 4
    (folder / "bad").unlink()
    monkeypatch.setattr(checking, "READERS", ("torch",))  # as if another library's version were installed
    assert checking.fault(setup_of(folder)) is None and len(asked) == 5


def test_headers_have_the_shapes_and_dtypes_of_the_tensors(folder: Path) -> None:
    tensors(lambda t: t.update(a=torch.ones(2, 3).half(), b=torch.ones(()).to(torch.float8_e4m3fn)))(folder)
    headers, whole = SafetensorsHeaders(folder), load_file(folder / "model.safetensors")
    for name, tensor in whole.items():
        assert (headers.get(name).shape, headers.get(name).dtype) == (tensor.shape, tensor.dtype)
        assert headers.get(name).device.type == "meta"


def test_of_a_gpu_it_says_what_fits_and_touches_none(folder: Path) -> None:
    setup = replace(setup_of(folder), device="cuda")
    setup.stages |= {
        "vision_encoder": VisionSettings(device="cuda", runner="graph", dtype="bfloat16"),
        "language_model": EngineConfig(device="cuda", dtype="bfloat16", quantization="fp8"),
    }
    assert "the weights take 0 MiB; whether they fit is not known" in checking.judge(setup)
    division = divide(80 * GIB, 0.9, (GIB, 15 * GIB))
    said = checking.judge(replace(setup, division=division))
    assert "made FP8 while it loads" in said and f"it fits: {division.describe()}." in said
    assert not torch.cuda.is_initialized()
