"""The registry: every name has a program that explains itself, where there is no GPU; and the small programs run."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import bench
import pytest
from bench import account, batch, vision
from gpu_power import Draw
from serving import DEFAULT_CHECKPOINT
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import LEAST, MOST, write_model
from workloads import WORKLOADS

from tessera.engine.engine import Engine
from tessera.models.registry import read_config
from tessera.preprocess.preprocessor import Preprocessor
from tessera.settings.stages import EngineConfig

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", bench.PROGRAMS)
def test_a_program_explains_itself(name: str, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0 and f"usage: {name}" in capsys.readouterr().out
    assert import_module(bench.PROGRAMS[name][0].partition(":")[0]).__doc__


@pytest.mark.parametrize("given", [[], ["no_such_bench"]])
def test_other_names_are_answered_by_the_list(given: list[str], monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *given])
    assert bench.main() == 2 and "  load " in capsys.readouterr().err


PROBE = """
import time
def main():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("ended", flush=True)
"""
AS_PROBE = """
import runpy, sys, bench
bench.PROGRAMS["probe"], sys.argv = ("probe", ""), ["bench", "probe"]
runpy.run_path(sys.path[1] + "/bench/__main__.py", run_name="__main__")
"""


def test_what_is_terminated_ends_what_it_began(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    folders = os.pathsep.join([str(Path(bench.__file__).parents[1]), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": folders}
    with subprocess.Popen([sys.executable, "-c", AS_PROBE], env=environment, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None and ran.stdout.readline() == "begun\n"
        ran.terminate()
        assert ran.communicate(timeout=30)[0] == "ended\n" and ran.returncode == 128 + signal.SIGTERM


def test_every_file_with_a_main_is_in_the_registry() -> None:
    folder = Path(bench.__file__).parent
    programs = {f"bench.{file.stem}" for file in folder.glob("[!_]*.py") if "\ndef main(" in file.read_text()}
    assert programs == {module for module, _ in bench.PROGRAMS.values() if ":" not in module} - {"load"}


def test_rows_that_are_lost_or_doubled_are_counted(tmp_path: Path, capsys: Captured) -> None:
    rows = [("r0", "yes"), ("r1", None), ("r2", "no"), ("r2", "no")]
    lines = [json.dumps({"id": name, "answer": answer, "error": None if answer else "why"}) for name, answer in rows]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    assert batch.judged(tmp_path / "out.jsonl", 5) == {"lost": 3, "doubled": 1}  # r3 and r4 are missing
    assert capsys.readouterr().err == "1 x why\n"


def test_a_job_alone(emitted: Any) -> None:
    figures = emitted(batch, "alone", "--rows", "200")
    assert list(figures) == [f"batch.alone.200.{name}" for name in ("rows_s", "memory_mb", "resume_s")]
    assert all(line["value"] > 0 for line in figures.values())


@pytest.mark.parametrize(
    ("family", "forwards", "found"),
    [
        ("internvl", ["tiles8", "b1"], {"tiles8.ms", "fp8.tiles8.ms", "b1.ms", "fp8.b1.ms"}),
        ("qwen2_vl", ["w5b.1"], {"w5b.1.picture_ms", "w5b.1.fp8.picture_ms"}),
    ],
)
def test_a_trial_of_a_tower(family: str, forwards: list[str], found: set[str], tmp_path: Path, emitted: Any) -> None:
    if family == "internvl":
        hf_native(tmp_path, Shape(image_size=56, patch_size=14))
    else:
        write_model(tmp_path)
    options = ["--device", "cpu", "--repeats", "2", "--shape", str(tmp_path), "--only", *forwards]
    figures = emitted(vision, *options)
    assert set(figures) == {f"trial.vision.{name}" for name in found | {"fp8.cosine"}}
    assert min(line["value"] for line in figures.values()) > 0
    assert 0.99 < figures["trial.vision.fp8.cosine"]["value"] < 0.9999


@pytest.mark.parametrize("family", ["internvl", "qwen2_vl"])
def test_the_account_of_requests_of_any_shape(family: str, tmp_path: Path, monkeypatch: Patch, emitted: Any) -> None:
    """On the CPU, without joules; a GPU's are what its counter says meanwhile."""
    folder = tmp_path / "a-family-shape"
    hf_native(folder) if family == "internvl" else write_model(folder, min_pixels=LEAST, max_pixels=MOST)
    short = [replace(WORKLOADS[name], width=56, height=84) for name in ("W7a", "W7c")]
    long = replace(WORKLOADS["W7b"], width=56, height=84, tokens=20, concurrency=3)
    monkeypatch.setattr(account, "WORKLOADS", {each.name: each for each in (*short, long)})
    options = ["--gpus", "", "--seconds", "0.02", "--checkpoint", str(folder)]
    figures = emitted(account, *options)
    prefix = "trial.account"
    assert set(figures) == {
        f"{prefix}.{name}.a-family.bf16.{rate}" for name, rate in (("W7a", "req_s"), ("W7b", "tok_s"), ("W7c", "req_s"))
    }
    for line in figures.values():
        parts = [line[f"{part}_ms"] for part in ("forward", "prefill", "decode") if f"{part}_ms" in line]
        streamed = line["metric"].endswith("tok_s")
        assert len(parts) == 2 + streamed and min(parts) > 0 and line["prompt_tokens"] > 20
        assert line["value"] == pytest.approx(1e3 * (20 if streamed else 1) / sum(parts), rel=0.01)


def test_a_requests_joules_are_those_of_its_parts(printed: Any) -> None:
    drawn = {watts: Draw(watts, 1500.0, 1.0) for watts in (600.0, 700.0)}
    parts = {"forward": (account.Cost(0.5, drawn[600.0]), 1.0), "prefill": (account.Cost(0.001, drawn[700.0]), 100.0)}
    account.report(WORKLOADS["W7a"], parts, "a.bf16", "cuda", {"prompt_tokens": 100})
    rate, joules = printed().values()
    assert (rate["metric"], rate["value"]) == ("account.W7a.a.bf16.req_s", 1.667)
    assert (joules["metric"], joules["value"], joules["unit"]) == ("account.W7a.a.bf16.joules", 370.0, "J/request")
    assert (rate["forward_watts"], rate["prefill_watts"], joules["prefill_joules"]) == (600, 700, 70.0)


def test_steps_are_measured_and_no_two_requests_share_a_block():
    options = EngineConfig(weights="random", max_batched_tokens=1024, max_sequences=16, kv_cache_bytes=64 << 20)
    prepared = account.prepare(Preprocessor.from_checkpoint(DEFAULT_CHECKPOINT), WORKLOADS["W1"])
    engine = Engine.from_checkpoint(DEFAULT_CHECKPOINT, options)
    prompts = account.Prompts(prepared, read_config(DEFAULT_CHECKPOINT), "cpu")
    found = account.prefill(engine, prompts, warm_up=1, steps=2, budget=1024, waiting=16)
    assert found.step_tokens == 1024 and found.tokens_per_s > 0 and found.ended > found.began  # full steps
    assert not engine.has_work() and engine.metrics.cached_tokens == 0
    stamps = account.decode_stamps(engine, prompts, batch=3, skip=4, steps=5, max_tokens=64)
    assert len(stamps) == 6 and stamps == sorted(stamps)
    assert engine.metrics.finished["cancelled"] == 3
    with pytest.raises(RuntimeError, match="too few"):
        account.decode_stamps(engine, prompts, batch=1, skip=4, steps=5, max_tokens=6)
