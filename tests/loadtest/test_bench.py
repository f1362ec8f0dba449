"""The registry: every name has a program that explains itself, where there is no GPU; and the small programs run."""

from __future__ import annotations

import json
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import bench
import pytest
from bench import batch, jobs, preprocess, vision
from serving import Running
from standin_server import standin
from tiny_checkpoints import Shape, hf_native
from tiny_qwen2_vl import write_model

from tessera.preprocess.preprocessor import Preprocessor, PreprocessSettings

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


def test_every_file_with_a_main_is_in_the_registry() -> None:
    folder = Path(bench.__file__).parent
    programs = {f"bench.{file.stem}" for file in folder.glob("[!_]*.py") if "\ndef main(" in file.read_text()}
    assert programs == {module for module, _ in bench.PROGRAMS.values() if ":" not in module} - {"load"}


def emitted(program: Any, monkeypatch: Patch, capsys: Captured, *arguments: str) -> dict[str, dict[str, Any]]:
    """The figures of a program, by name."""
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    assert program.main() == 0
    return {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}


def test_rows_that_are_lost_or_doubled_are_counted(tmp_path: Path, capsys: Captured) -> None:
    rows = [("r0", "yes"), ("r1", None), ("r2", "no"), ("r2", "no")]
    lines = [json.dumps({"id": name, "answer": answer, "error": None if answer else "why"}) for name, answer in rows]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    assert batch.judged(tmp_path / "out.jsonl", 5) == {"lost": 3, "doubled": 1}  # r3 and r4 are missing
    assert capsys.readouterr().err == "1 x why\n"


def test_a_job_alone(monkeypatch: Patch, capsys: Captured) -> None:
    figures = emitted(batch, monkeypatch, capsys, "alone", "--rows", "200")
    assert list(figures) == [f"batch.alone.200.{name}" for name in ("rows_s", "memory_mb", "resume_s")]
    assert all(line["value"] > 0 for line in figures.values())


def test_what_questions_wait_and_what_the_job_loses(monkeypatch: Patch, capsys: Captured) -> None:
    @contextmanager
    def serve(_: Any) -> Any:
        with standin() as address:
            yield Running([address], [], [], "", 0.0)

    monkeypatch.setattr(jobs, "serve", serve)
    # What the job loses here, and how long a starved machine takes, is chance.
    monkeypatch.setattr(jobs, "BARS", dict.fromkeys(jobs.BARS, float("inf")))
    options = ["--gpus", "", "--concurrency", "4", "--least", "200", "--processes", "1", "--rate", "50", "--seed", "3"]
    figures = emitted(jobs, monkeypatch, capsys, *options)
    assert set(figures) == {"jobs.ttft_p50_ms", "jobs.ttft_p99_ms", "jobs.loss_pct", "jobs.equal.ttft_p50_ms"}
    p50, p99 = figures["jobs.ttft_p50_ms"], figures["jobs.ttft_p99_ms"]
    assert 0 < p50["value"] <= p99["value"] and p50["questions"] > 0
    loss = figures["jobs.loss_pct"]
    assert abs(loss["value"] - 100 * (1 - loss["beside_req_s"] / (sum(loss["alone_req_s"]) / 2))) < 0.1


def test_a_row_compares_the_same_tiles_of_pillow_and_both_modes() -> None:
    preprocessors = {
        mode: Preprocessor.from_checkpoint(preprocess.CHECKPOINT, PreprocessSettings(resize=mode))
        for mode in ("reference", "fast")
    }
    row = preprocess.compare(preprocessors, (480, 320), pictures=1, rounds=1)
    assert (row["size"], row["tiles"]) == ("480x320", 7)
    assert row["reference"]["mean_difference"] <= 0.1 and row["reference"]["max_difference"] <= 3
    assert row["reference"]["mean_difference"] < row["fast"]["mean_difference"] < 2


@pytest.mark.parametrize(
    ("family", "forwards", "found"),
    [
        ("internvl", ["tiles8", "b1"], {"tiles8.ms", "fp8.tiles8.ms", "b1.ms", "fp8.b1.ms"}),
        ("qwen2_vl", ["w5b.1"], {"w5b.1.picture_ms", "w5b.1.fp8.picture_ms"}),
    ],
)
def test_a_trial_of_a_tower(
    family: str, forwards: list[str], found: set[str], tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    if family == "internvl":
        hf_native(tmp_path, Shape(image_size=56, patch_size=14))
    else:
        write_model(tmp_path)
    options = ["--device", "cpu", "--repeats", "2", "--shape", str(tmp_path), "--only", *forwards]
    figures = emitted(vision, monkeypatch, capsys, *options)
    assert set(figures) == {f"trial.vision.{name}" for name in found | {"fp8.cosine"}}
    assert min(line["value"] for line in figures.values()) > 0
    assert 0.99 < figures["trial.vision.fp8.cosine"]["value"] < 0.9999
