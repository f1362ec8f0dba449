"""The tables in the documents are the recorded figures, and the comparison says who is ahead."""

import io
import json

import figures
import pytest
import record
import report
import seeds


def test_the_documents_hold_what_was_recorded():
    assert not report.update(check=True), "run: .venv/bin/python loadtest/report.py"


def test_a_statements_figures_are_the_newest_by_name_or_pattern_or_not_measured_yet():
    about = {"unit": "ms", "machine": "m", "commit": "c", "date": "d"}
    figures = {"a.x": {"value": 200704, "ci95": 0.25, **about}, "a.y": {"value": 2, "ci95": [1, 2], **about}}
    found = [seeds.matching(name, figures) for name in ("a.*", "new.x|a.x", "new.y|old.y")]
    assert [[name for name, _ in each] for each in found] == [["a.x", "a.y"], ["a.x"], ["new.y"]]
    assert [seeds.words(*each) for each in (*found[0], *found[2])] == [
        "`a.x` 200704 ± 0.25 ms",
        "`a.y` 2 ms",
        "`new.y` not measured yet",
    ]


def test_the_ladders_ratios_stand_beside_the_statements(tmp_path):
    about = {"rung": "mps", "job": "equal", "machine": "m", "commit": "c", "date": "d"}
    compared = about | {"below": "batching", "flight": "many", "ratio": 1.1, "ci95": 0.02}
    (tmp_path / "ladder.jsonl").write_text(f"{json.dumps(about | {'req_s': 3})}\n{json.dumps(compared)}\n")
    found = seeds.matching("ladder: mps *", seeds.rungs(tmp_path / "ladder.jsonl"))
    assert [seeds.words(*each) for each in found] == [
        "`ladder: mps over batching, equal, many in flight` 1.1 ± 0.02 ratio"
    ]


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
    assert [*figures.read(results[0]).values()] == [other, newer]
    assert [*map(len, map(json.loads, results[0].read_text().splitlines()))] == [2, len(figures.RUN), 3, 3]
    assert "python bench.py" in capsys.readouterr().out and results[1] == [1, 1, 1]


def test_a_figure_that_lacks_its_commit_is_refused_and_no_figure_is_an_error(monkeypatch, results):
    figure = {name: "x" for name in record.REQUIRED} | {"metric": "a.b", "commit": None}
    with pytest.raises(ValueError, match=r"a\.b lacks commit"):
        recorded(monkeypatch, json.dumps(figure))
    assert recorded(monkeypatch, "nothing came of it") == 1
    assert results[1] == []
