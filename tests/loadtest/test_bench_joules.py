"""Where the joules go, on the CPU: parts that are all of a forward, and every line of the account."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import bench_attention
import bench_joules
import joules_account
import pytest
import torch
from energy import Cost, Repeater
from gpu_power import Draw, GpuPower
from joules_account import ASKS, Account, Ask, Language, Report, Sizes
from tiny_checkpoints import Shape, hf_native
from torch.utils.flop_counter import FlopCounterMode

from tessera.checkpoint.config import read_config
from tessera.kernels.tower_layers import PLAIN, gpu_kernels
from tessera.models.tower import load_tower
from tessera.settings.stages import EngineConfig

SIZES = Sizes(tokens=1900, tiles=2)  # a whole prompt of W2 and the beginning of one
WATTS, MHZ = 640.0, 1500.0


class Power(GpuPower):
    """A GPU's counter beside the CPU, which says the same of any time."""

    def __init__(self, gpus: list[str], interval_s: float) -> None:
        super().__init__([])

    def between_changes(self, began: float, ended: float) -> Draw:
        return Draw(WATTS, MHZ, 60, 1.0)


@pytest.fixture
def power(monkeypatch) -> None:
    monkeypatch.setattr(bench_joules, "GpuPower", Power)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return hf_native(tmp_path_factory.mktemp("tiny"), Shape(image_size=56, patch_size=14))


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("quantization", ["checkpoint", "fp8"])
@pytest.mark.parametrize("name", ASKS)
def test_the_parts_of_a_step_are_the_step(checkpoint, name, quantization):
    language = Language(read_config(checkpoint), "cpu", quantization, SIZES)
    batch = language.step(ASKS[name])
    assert batch.tokens == SIZES.tokens and batch.spans[-1].count < ASKS[name].prompt
    parts = language.recorded(batch).parts()
    layers = len(language.model.layers)
    assert {part: len(calls) for part, calls in parts.items()} == {
        "embedding": 1, "norm": 2 * layers - 1, "qkv": layers, "attention": layers - 1, "output": layers - 1,
        "gate_up": layers - 1, "down": layers - 1, "last_layer": 6, "head": 1,
    }  # fmt: skip
    again = sum(flops(call) for calls in parts.values() for call in calls)
    assert again == flops(partial(language.runner.launch, batch)) > 0


def test_kernels_of_ours_are_found_within_the_attention(checkpoint, monkeypatch):
    pytest.importorskip("triton", reason="they are written in triton, which is not installed")
    monkeypatch.setattr(joules_account, "EngineConfig", partial(EngineConfig, attention="triton"))
    language = Language(read_config(checkpoint), "cpu", "checkpoint", Sizes(tokens=40))
    calls = language.recorded(language.step(SimpleNamespace(prompt=30, picture_rows=8)))
    layers = len(language.model.layers)
    assert {name: len(made) for name, made in calls.within("attention").items()} == {
        "rotate_store": layers - 1,
        "kernel": layers - 1,
    }
    with torch.inference_mode():  # as the bench repeats them
        for made in calls.calls.values():
            for call in made:
                call()


def test_a_gate_up_that_ends_in_the_activation_is_a_part_with_none_behind_it(checkpoint):
    language = Language(read_config(checkpoint), "cpu", "checkpoint", Sizes(tokens=40))
    for layer in language.model.layers:
        layer.gate_up.scheme.fused_rows = 40
    calls = language.recorded(language.step(SimpleNamespace(prompt=30, picture_rows=8)))
    assert len(calls.parts()["gate_up"]) == len(language.model.layers) - 1
    assert "silu_multiply" not in calls.within("gate_up") and "silu_multiply" in calls.within("last_layer")


def test_every_figure_of_the_account(checkpoint, power, capsys):
    given = ["--device", "cpu", "--checkpoint", str(checkpoint), "--seconds", "0", "--settle", "0"]
    bench_joules.main([*given, "--accounts", "prefill", "vision"], SIZES)
    printed = capsys.readouterr().out
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    lines = {line["metric"]: line for line in found}
    step = ("embedding", "norm", "qkv", "attention", "output", "gate_up", "down", "last_layer", "head")
    forward = ("embedding", "norm", "qkv", "attention", "output", "fc1_gelu", "fc2", "projector")
    within = ("attention/sdpa", "gate_up/product", "gate_up/silu_multiply")
    wholes = ("attention_W2", "whole_W1", "whole_W2", "explained_W1", "explained_W2")
    assert lines.keys() == {
        *(f"trial.joules.prefill.{part}" for part in (*step, *within, *wholes)),
        *(f"trial.joules.vision.{part}" for part in (*forward, "whole", "explained")),
        *(f"trial.joules.{name}.alone" for name in ASKS),
    }
    whole = lines["trial.joules.prefill.whole_W1"]
    assert (whole["watts"], whole["mhz"]) == (WATTS, MHZ)
    parts = sum(lines[f"trial.joules.prefill.{part}"]["value"] for part in step)
    explained = lines["trial.joules.prefill.explained_W1"]["value"]
    assert explained == pytest.approx(parts / whole["value"], rel=1e-3)
    tile = lines["trial.joules.vision.whole"]["value"] / SIZES.tiles
    w2 = 7 * tile + 1855 / SIZES.tokens * lines["trial.joules.prefill.whole_W2"]["value"]
    assert lines["trial.joules.W2.alone"]["value"] == pytest.approx(w2, rel=1e-3)
    assert lines["trial.joules.W2.alone"]["served"] > 0
    assert "  gate_up/silu_multiply" in printed and "  fc1_gelu/product" in printed
    assert "J a request: parts, wholes alone, through the server" in printed


@pytest.mark.parametrize("kernels", [PLAIN, gpu_kernels("default", epilogue=False)], ids=["plain", "gpu"])
def test_the_parts_of_a_forward_are_the_forward(checkpoint, kernels):
    tower = load_tower(read_config(checkpoint), random_weights=True)
    tiles = torch.randint(0, 256, (2, 56, 56, 3), dtype=torch.uint8)
    parts = bench_joules.recorded_forward(tower, kernels, tiles).parts()
    assert sum(flops(call) for calls in parts.values() for call in calls) == flops(partial(tower, tiles)) > 0


def test_without_a_counter_there_are_times_and_no_figures(checkpoint, capsys):
    given = ["--device", "cpu", "--checkpoint", str(checkpoint), "--seconds", "0", "--settle", "0"]
    bench_joules.main([*given, "--accounts", "vision"], SIZES)
    printed = capsys.readouterr().out
    assert "fc1_gelu" in printed and "{" not in printed


def test_attention_stands_beside_torchs(capsys, monkeypatch):
    pytest.importorskip("triton", reason="ours is written in triton, which is not installed")
    sizes = {"HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16, "GROUP": 2, "MOST_COPIES": 2}
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32, **sizes}.items():
        monkeypatch.setattr(bench_attention, name, value)
    monkeypatch.setattr(bench_joules, "ATTENTIONS", (bench_attention.Case(2, 20, 20),))
    with Power([], 0.0) as power:
        repeater = Repeater(power, torch.device("cpu"), 0.0, 0.0)
        bench_joules.attention(repeater, bench_joules.Report("trial.joules", ""))
    printed = capsys.readouterr().out
    assert "trial.joules.attention.2x20.ours" in printed and "sdpa cudnn" in printed


def test_the_gate_up_that_is_one_kernel_stands_beside_the_library(checkpoint, power, capsys, monkeypatch):
    monkeypatch.setattr(bench_joules, "GATE_UP_ROWS", (40,))
    given = ["--device", "cpu", "--checkpoint", str(checkpoint), "--seconds", "0", "--settle", "0"]
    bench_joules.main([*given, "--accounts", "gate_up"])
    printed = capsys.readouterr().out
    assert all(f'"trial.joules.gate_up.m40.{name}"' in printed for name in ("library", "epilogue"))


def test_accounts_are_chosen_and_fp8_has_no_candidates_of_bf16(checkpoint, monkeypatch):
    done: list[str] = []
    places = {"attention": "attention", "gate_up": "gate_up", "algorithms": "cublaslt.compare"}
    for name, function in places.items():
        monkeypatch.setattr(f"bench_joules.{function}", lambda *_, name=name: done.append(name))
    given = ["--device", "cpu", "--checkpoint", str(checkpoint), "--accounts", *places]
    bench_joules.main(given)
    bench_joules.main([*given, "--quantization", "fp8"])
    assert done == ["attention", "gate_up", "algorithms", "algorithms"]


def test_it_says_that_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench_joules.main([])


def test_a_decode_step_and_what_long_answers_cost(checkpoint, monkeypatch, capsys):
    pytest.importorskip("triton", reason="the attention that graphs can hold is written in it")
    monkeypatch.setattr(joules_account, "EngineConfig", partial(EngineConfig, attention="triton"))
    monkeypatch.setattr(bench_joules, "WRITERS", {"W4b": Ask(0, 30, decoded=8, together=4)})
    sizes = Sizes(tokens=60, tiles=2)
    language = Language(read_config(checkpoint), "cpu", "checkpoint", sizes)
    report = Report("trial.joules", "")
    decodes = bench_joules.decode(language, Repeater(Power([], 0.0), torch.device("cpu"), 0.0, 0.0), report)
    layers = len(language.model.layers)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    lines = {line["metric"].removeprefix("trial.joules.decode.b4."): line for line in found}
    assert {name: line["calls"] for name, line in lines.items() if "calls" in line} == {
        "embedding": 1, "norm": 2 * layers + 1, "qkv": layers, "attention": layers, "output": layers,
        "gate_up": layers, "down": layers, "head": 1, "attention/rotate_store": layers, "attention/kernel": layers,
        "gate_up/product": layers, "gate_up/silu_multiply": layers, "whole": 1,
    }  # fmt: skip
    whole = Cost(0.5, 100.0, MHZ)
    account = Account({}, {}, whole)
    bench_joules.writers(decodes, account, account, sizes, report)
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert alone["value"] == pytest.approx(100 * 30 / 60 + decodes["W4b"].joules * 8 / 4, rel=1e-3)
    assert alone["tok_s"] == pytest.approx(9 / (0.25 + decodes["W4b"].seconds * 2), rel=1e-2)
