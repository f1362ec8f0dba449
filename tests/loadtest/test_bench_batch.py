"""The benchmark of `tessera batch`, small: what it counts, and that it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench import batch as bench_batch


def test_rows_that_are_lost_or_doubled_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("r0", "yes"), ("r1", None), ("r2", "no"), ("r2", "no")]
    lines = [json.dumps({"id": name, "answer": answer, "error": None if answer else "why"}) for name, answer in rows]
    (tmp_path / "out.jsonl").write_text("\n".join(lines) + "\n")
    assert bench_batch.judged(tmp_path / "out.jsonl", 5) == {"lost": 3, "doubled": 1}  # r3 and r4 are missing
    assert capsys.readouterr().err == "1 x why\n"


def test_a_job_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["batch", "alone", "--rows", "200"])
    assert bench_batch.main() == 0
    figures = {line["metric"]: line["value"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(figures) == [f"batch.alone.200.{name}" for name in ("rows_s", "memory_mb", "resume_s")]
    assert all(value > 0 for value in figures.values())
