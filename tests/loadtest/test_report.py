"""The tables in the documents are the recorded figures, and the comparison says who is ahead."""

from __future__ import annotations

import io
import json

import pytest
import record
import report
from workloads import WORKLOADS


def test_the_documents_hold_what_was_recorded():
    assert not report.update(check=True), "run: .venv/bin/python loadtest/report.py"


def test_every_workload_of_the_peers_file_is_a_standard_one():
    assert set(json.loads(report.PEERS.read_text())["workloads"]) <= set(WORKLOADS)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Results of their own, and documents that are left alone."""
    updates = []
    monkeypatch.setattr(record, "RESULTS", tmp_path / "metrics.jsonl")
    monkeypatch.setattr(record.report, "update", lambda: updates.append(1))
    return tmp_path / "metrics.jsonl", updates


def recorded(monkeypatch, *lines: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return record.main()


def test_a_figure_takes_the_place_of_the_one_before_and_other_lines_pass(monkeypatch, capsys, results):
    first, other = ({name: "x" for name in record.REQUIRED} | {"metric": name} for name in ("a.b", "c.d"))
    newer = first | {"value": "y"}
    for figure in (first, other, newer):
        assert recorded(monkeypatch, "python bench.py", json.dumps(figure)) == 0
    assert [json.loads(line) for line in results[0].read_text().splitlines()] == [other, newer]
    assert "python bench.py" in capsys.readouterr().out and results[1] == [1, 1, 1]


def test_a_figure_that_lacks_its_commit_is_refused_and_no_figure_is_an_error(monkeypatch, results):
    figure = {name: "x" for name in record.REQUIRED} | {"metric": "a.b", "commit": None}
    with pytest.raises(ValueError, match=r"a\.b lacks commit"):
        recorded(monkeypatch, json.dumps(figure))
    assert recorded(monkeypatch, "nothing came of it") == 1
    assert results[1] == []
