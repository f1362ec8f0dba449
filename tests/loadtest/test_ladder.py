"""The ladder: what each rung is served by and asked, and what becomes of the lines it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import ladder as bench_ladder
from bench import ladder_report, ladder_rungs
from bench.ladder_report import Ladder
from bench.ladder_rungs import NAMES, jobs
from serving import DEFAULT_CHECKPOINT

from tessera.launcher.settings import set_up
from tessera.linear.formats.int4 import Int4
from tessera.linear.quantization import scheme_selector
from tessera.prompt.sampling import SamplingParameters

ABOUT = {"machine": "a GPU", "commit": "abc", "date": "2026-11-22", "versions": {"torch": "2.11.0"}}
SPEED = {
    "ci95": 0.5, "p50_ms": 800.0, "p99_ms": 900.0, "tokens": 4, "prompt_tokens": 1852, "concurrency": 4,
    "busy": 0.98, "watts": 690.0, **ABOUT,
}  # fmt: skip


# ---- what a rung is


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_settings_take_what_a_rung_sets(name: str, tmp_path: Path):
    setup = ladder_rungs.setup(name, tmp_path, (), DEFAULT_CHECKPOINT)
    found = set_up(setup.repository, None, {"TESSERA_DEVICE": "cpu"}, setup.settings)
    values = {effective.name: str(effective.value) for effective in found.effective}
    assert {key: values[key] for key in setup.settings} == setup.settings
    for job in jobs(name).values():
        SamplingParameters.parse(job.sampling)


def test_the_shape_in_4_bits_is_one_that_the_engine_reads(tmp_path: Path):
    config = json.loads((ladder_rungs.int4_shape(tmp_path / "int4") / "config.json").read_text())
    select = scheme_selector(config["quantization_config"])
    assert isinstance(select(["model.layers.0.mlp.down_proj"]), Int4)
    assert not isinstance(select(["lm_head"]), Int4)


@pytest.mark.server
def test_the_first_rung_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    results = tmp_path / "ladder.jsonl"
    options = ["--checkpoint", str(DEFAULT_CHECKPOINT), "--gpus", "", "--in-flight", "1", "--processes", "1"]
    monkeypatch.setattr(
        "sys.argv", ["ladder", "--parts", "speed", "--rungs", "start", "--results", str(results), *options]
    )
    assert bench_ladder.main() == 0
    (line,) = map(json.loads, results.read_text().splitlines())
    assert (line["rung"], line["job"], line["prompt_tokens"], line["requests"]) == ("start", "equal", 506, 5)
    assert line["req_s"] > 0 and line["p99_ms"] >= line["p50_ms"] > 0


# ---- what becomes of the lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """transformers at two batch sizes, two rungs at both jobs, and recalls; one line is superseded."""
    stages = {"stages_p50": {"preprocess_ms": 48.4, "vision_ms": 203.1}}
    on, off = {"embeddings_on_cpu": 0, "graph_steps": 0.9}, {"embeddings_on_cpu": 30, "graph_steps": 0.0, **stages}
    lines = [
        {"rung": "transformers", "job": "equal", "batch": 1, "req_s": 5.0, **SPEED},
        {"rung": "transformers", "job": "equal", "batch": 8, "req_s": 10.0, **SPEED},
        {"rung": "start", "job": "equal", "req_s": 99.0, **SPEED, **off},
        {"rung": "start", "job": "equal", "req_s": 8.0, **SPEED, **off},
        {"rung": "fp8_vit", "job": "equal", "req_s": 30.0, **SPEED, **on},
        {"rung": "graph_decoder", "job": "policy", "req_s": 90.0, **SPEED, "prompt_tokens": 316, **on},
        {"rung": "labels", "job": "policy", "req_s": 80.0, **SPEED, "tokens": 0, "prompt_tokens": 316, **on},
        {"rung": "start", "job": "equal", "recall": 1.0, "questions": 3000, "wrong": [7], **ABOUT},
        {"rung": "tile_policy", "job": "policy", "recall": 0.997, "questions": 3000, "wrong": list(range(9)), **ABOUT},
        {"rung": "transformers", "job": "equal", "recall": 1.0, "questions": 100, "wrong": [], **ABOUT},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_figures_are_the_best_rungs_over_transformers_and_recall_s_drop_is_of_the_same_questions(file: Path):
    found = {metric: (value, unit, notes) for metric, value, unit, notes in Ladder.read(file).figures()}
    assert {metric: value for metric, (value, _, _) in found.items()} == {
        "ladder.equal_tokens.over_start": 6.0,
        "ladder.equal_tokens.over_best": 3.0,
        "ladder.top_over_start": 18.0,
        "ladder.top_over_best": 9.0,
        "ladder.recall_drop": pytest.approx(100 * 8 / 3000, abs=1e-3),
    }
    assert found["ladder.equal_tokens.over_start"][2]["ci95"] == pytest.approx(
        6 * (0.1**2 + (1 / 60) ** 2) ** 0.5, abs=0.01
    )
    assert found["ladder.top_over_best"][2].items() >= ABOUT.items()
    notes = found["ladder.recall_drop"][2]
    assert (notes["rung"], notes["below"], notes["questions"]) == ("graph_decoder", "start", 3000)
    assert notes["ci95"] == pytest.approx(0.206, abs=0.001)  # by 9 and 1 of 3002


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prompt_tokens": 316}, "should be equal, are not"),
        ({"embeddings_on_cpu": 0}, "did not work as its rung says: 0 requests' rows came over the CPU"),
        ({"graph_steps": 0.5}, "0.5 of its steps ran as CUDA graphs"),
    ],
)
def test_lines_that_are_not_what_they_are_called_are_refused(file: Path, changed: dict[str, Any], told: str):
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, json.dumps(json.loads(lines[3]) | changed)]))
    with pytest.raises(ValueError, match=told):
        Ladder.read(file)


def test_the_page_holds_what_was_recorded():
    ladder = Ladder.read(ladder_report.RESULTS)
    assert not ladder_report.update(ladder, check=True), "run: python loadtest/bench_ladder.py --parts report"
