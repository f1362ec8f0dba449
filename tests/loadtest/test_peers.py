"""Engines beside ours: which pairs count and who is ahead, how engines are found and started, and the command whole."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import peers, peers_report
from bench.peers_report import Standing

ABOUT = {"engine": "vllm", "workload": "W1", "shape": "internvl3-8b", "form": "bf16", "unit": "req/s"}
TAKEN = {"version": "1", "machine": "m", "commit": "c", "date": "d"}


def pair(ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    return ABOUT | TAKEN | {"ours": {"rate": ours, "joules": 5.0}, "theirs": {"rate": theirs, "joules": 6.0}} | more


def standings(tmp_path: Path, *lines: dict[str, Any]) -> list[Standing]:
    file = tmp_path / "peers.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return peers_report.read(file)


def test_pairs_of_a_version_count_together(tmp_path: Path) -> None:
    old, other = pair(1, 9, version="0"), pair(10, 10, workload="W4a", unit="tok/s")
    # The results themselves make the tree dirty.
    found = standings(tmp_path, old, pair(110, 100), other, pair(121, 110, commit="c-dirty"))
    told = [(each.title, each.engine, len(each.pairs)) for each in found]
    assert told == [("W1 bf16", "vLLM 0", 1), ("W1 bf16", "vLLM 1", 2), ("W4a bf16", "vLLM 1", 1)]
    assert found[1].ratio == (pytest.approx(1.1), pytest.approx(0, abs=1e-9))
    assert found[2].ratio == (1.0, None)
    figures = {name: (value, unit) for name, value, unit, _ in found[1].figures()}
    assert figures == {
        "peers.vllm.W1.bf16.ratio": (1.1, "ratio"),
        "peers.vllm.W1.bf16.req_s": (105.0, "req/s"),
        "peers.vllm.W1.bf16.joules_ratio": (1.2, "theirs/ours"),
    }


@pytest.mark.parametrize(
    ("pairs", "ahead"),
    [
        ([(90.0, 100.0)], "theirs"),
        ([(100.0, 100.0)], "neither"),
        ([(90.0, 100.0), (91.0, 100.0), (90.0, 101.0)], "theirs"),
        ([(101.0, 100.0), (99.0, 100.0), (104.0, 100.0)], "neither"),
        ([(111.0, 100.0), (110.0, 100.0), (112.0, 100.0)], "ours"),
    ],
)
def test_who_is_ahead_is_told_by_the_interval(pairs: list[tuple[float, float]], ahead: str) -> None:
    assert Standing([pair(*each) for each in pairs]).ahead == ahead


def test_losses_and_what_was_not_measured_are_told(tmp_path: Path) -> None:
    lost = pair(90, 100, workload="W2")
    found = standings(tmp_path, pair(110, 100), lost, pair(5, 6, shape="another"), pair(8, 4, engine="lmdeploy"))
    page = peers_report.page(found)
    assert "Of 4 pairs Tessera is ahead in 2, behind in 2 (W1 another bf16 (vLLM 1), W2 bf16 (vLLM 1))" in page
    assert "| W1 bf16 | 110 req/s, 100 req/s | 1.1 | ours | 8 req/s, 4 req/s | 2 | ours |\n" in page
    assert "Not measured yet: SGLang." in page
    readme = peers_report.comparison(found)
    assert "at once | 110 req/s | 100 req/s | 1.10 |  |  |  |\n" in readme and "5 req/s" not in readme
    assert "vLLM 1 beside Tessera c on m, d." in readme


def environment(folder: Path, name: str, python: str, program: str = "exit 0") -> Path:
    """A virtual environment with this command, whose Python does this."""
    (folder / "bin").mkdir(parents=True)
    for each, line in ((name, program), ("python", python)):
        (folder / "bin" / each).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / each).chmod(0o755)
    return folder


def test_an_engine_is_what_its_own_environment_has(tmp_path: Path) -> None:
    there = environment(tmp_path / "there", "vllm", "echo 0.33.0")
    found = peers.installed("vllm", str(there))
    assert (found.program, found.version) == (str(there / "bin" / "vllm"), "0.33.0")
    with pytest.raises(ValueError, match="no command lmdeploy in "):
        peers.installed("lmdeploy", str(there))
    with pytest.raises(ValueError, match="has no package sglang"):
        peers.installed("sglang", str(environment(tmp_path / "other", "python", "exit 1")))


def test_the_command_of_an_engine() -> None:
    options = argparse.Namespace(
        checkpoint=Path("/shape"), weights="random", form="fp8", flags=["vllm=--max-num-seqs 8 --x 'a b'"]
    )
    vllm, lmdeploy = (peers.Installed(name, f"/env/bin/{name}", "1") for name in ("vllm", "lmdeploy"))
    told = " ".join(vllm.command(options, 8123, 0.4567))
    assert told.startswith("/env/bin/vllm serve /shape --host 127.0.0.1 --port 8123 ")
    assert told.endswith(" dummy --gpu-memory-utilization 0.46 --quantization fp8 --max-num-seqs 8 --x a b")
    with pytest.raises(ValueError, match="no random weights"):
        lmdeploy.command(options, 1, 0.5)
    options.weights = "checkpoint"
    with pytest.raises(ValueError, match="does not make fp8"):
        lmdeploy.command(options, 1, 0.5)
    options.form = "bf16"
    assert lmdeploy.command(options, 1, 0.5)[1:4] == ["serve", "api_server", "/shape"]


FEW = [
    "--gpus",
    "",
    "--concurrency",
    "2",
    "--processes",
    "1",
    "--least",
    "10",
    "--workloads",
    "W1",
    "W4b",
    "--seed",
    "7",
]


def test_an_engine_in_turns_with_ours(emitted: Any, stood_in: Any) -> None:
    stood_in(peers)
    before = peers_report.RESULTS.read_bytes()
    found = emitted(peers, "--engines", "standin", "--turns", "2", *FEW)
    assert peers_report.RESULTS.read_bytes() == before
    prefix = "trial.peers.standin"
    rates = {"W1": ("ratio", "req_s"), "W4b": ("ratio", "tok_s")}
    assert set(found) == {f"{prefix}.{job}.default_model.bf16.{what}" for job, each in rates.items() for what in each}
    ratio = found[f"{prefix}.W1.default_model.bf16.ratio"]
    assert ratio["turns"] == 2 and len(ratio["ours"]) == len(ratio["theirs"]) == 2 and ratio["ci95"] > 0
    assert ratio["value"] == pytest.approx(
        (ratio["ours"][0] / ratio["theirs"][0] * ratio["ours"][1] / ratio["theirs"][1]) ** 0.5, rel=1e-3
    )


def test_turns_of_two_runs_count_together(emitted: Any, stood_in: Any, tmp_path: Path, monkeypatch: Any) -> None:
    stood_in(peers)
    monkeypatch.setitem(peers.WORKLOADS, "W4b", replace(peers.WORKLOADS["W4b"], tokens=17, concurrency=2))
    few = ["--engines", "standin", "--turns", "1", "--workloads", "W4b", "--results", str(tmp_path / "peers.jsonl")]
    shape = ["--checkpoint", "loadtest/shapes/internvl3-8b-shape", "--weights", "random", "--processes", "1"]
    once, twice = (emitted(peers, *few, *shape)["peers.standin.W4b.bf16.ratio"] for _ in range(2))
    assert (once["turns"], twice["turns"]) == (1, 2) and "ci95" not in once and twice["ci95"] > 0
    assert twice["ours"][0] == once["ours"][0]


def test_what_is_not_there_or_fails_is_said(monkeypatch: Any, stood_in: Any, tmp_path: Path, capsys: Any) -> None:
    broken = environment(tmp_path / "vllm", "vllm", "echo 0.33.0", "echo no GPU here; exit 3")
    stood_in(peers)
    few = ["--engines", "vllm,lmdeploy", "--env", f"vllm={broken}", f"lmdeploy={tmp_path}", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["peers", *few, *FEW])
    assert peers.main() == 1
    said = capsys.readouterr().err
    assert "vllm: it did not start: no GPU here" in said
    assert "lmdeploy is left out, its cells stay empty: there is no command lmdeploy in " in said
