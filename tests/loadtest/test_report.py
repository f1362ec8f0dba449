"""The tables in the documents are the recorded figures, and the comparison says who is ahead."""

from __future__ import annotations

import io
import json

import pytest
import record
import report
from figures import ROOT
from workloads import WORKLOADS

PEER = {"title": "a photo", "unit": "req/s", "bf16": 20.8, "fp8": 24.11, "side_by_side": [[19.0, 20.0], [9.9, 10.0]]}
STREAMED = {
    "title": "a long answer", "unit": "tok/s", "bf16": 8259, "fp8": 10077, "ttft_ms": {"bf16": 371, "fp8": 350},
    "side_by_side": [[11.0, 10.0]],
}  # fmt: skip


PAGES = {"figures": "docs", "title": "a page", "unit": "req/s", "bf16": 30.0}


def test_the_documents_hold_what_was_recorded():
    assert not report.update(check=True), "run: .venv/bin/python loadtest/report.py"


def test_the_readme_names_no_metric():
    text = (ROOT / "README.md").read_text()
    assert [metric for metric in report.newest() if metric in text] == []


def test_the_comparison_has_a_row_for_each_workload_and_says_who_is_ahead():
    figures = {
        "serve.Wx.bf16.req_s": {"value": 19.537},
        "serve.Wx.fp8.req_s": {"value": 26.5},
        "serve.Wy.bf16.tok_s": {"value": 8986.2},
        "serve.Wy.bf16.ttft_p50_ms": {"value": 281.4},
        "serve.Wy.fp8.tok_s": {"value": 12000.0},
        "serve.Wy.w4a16.tok_s": {"value": 13000.0},
        "serve.Wy.w4a16.ttft_p50_ms": {"value": 55.2},
    }
    rows = report.comparison(figures, {"Wx": PEER, "Wy": STREAMED, "Wz": PEER}).splitlines()[2:]
    assert rows == [
        "| a photo | 19.54 req/s | 20.8 req/s | vLLM: Tessera has 0.95 and 0.99 of it | 26.5 req/s | 24.11 req/s |",
        "| a long answer | 8,986 tok/s, first token 281 ms | 8,259 tok/s, first token 371 ms "
        "| Tessera: 1.10 times vLLM | 12,000 tok/s; with 4-bit weights 13,000 tok/s, first token 55 ms "
        "| 10,077 tok/s, first token 350 ms |",
        "| a photo | not measured yet | 20.8 req/s | vLLM: Tessera has 0.95 and 0.99 of it "
        "| not measured yet | 24.11 req/s |",
    ]
    assert report.ahead([0.98, 1.02]) == "neither: 0.98 and 1.02"


def test_what_was_not_taken_side_by_side_says_so():
    figures = {"docs.Wd.req_s": {"value": 36.0}, "docs.Wd.fp8.req_s": {"value": 41.0}}
    rows = report.comparison(figures, {"Wd": PAGES, "We": PAGES}).splitlines()[2:]
    assert rows == [
        "| a page | 36 req/s | 30 req/s | Tessera: 1.20 times vLLM (on different days and machines) | 41 req/s "
        "| not measured |",
        "| a page | not measured yet | 30 req/s | not measured yet | not measured yet | not measured |",
    ]


def test_the_peers_file_is_small_and_every_one_of_its_workloads_is_a_standard_one():
    peers = json.loads(report.PEERS.read_text())["workloads"]
    assert report.PEERS.stat().st_size < 3000
    assert {name: peer.get("figures", "serve") for name, peer in peers.items()} == {
        name: workload.figures for name, workload in WORKLOADS.items() if len(workload.prompts) == 1
    }


def test_joules_stand_beside_their_whole():
    cost = {"unit": "J/step", "us_a_call": 3311.9, "calls": 27, "watts": 698.4, "mhz": 1490.2, "commit": "c0ffee"}
    figures = {
        "joules.prefill.gate_up": {**cost, "value": 61.2},
        "joules.prefill.whole_W1": {**cost, "value": 120.0, "us_a_call": 170_000.0, "calls": 1},
        "joules.prefill.explained_W1": {"unit": "share", "value": 0.975, "commit": "c0ffee"},
        "serve.W1.bf16.joules": {"unit": "J/request", "value": 5.74},
    }
    assert report.joules(figures).splitlines()[2:] == [
        "| prefill.gate_up | 61.2 J/step | 51.0% | 3,311.9 x 27 | 698 | 1490 | c0ffee |",
        "| prefill.whole_W1 | 120 J/step | 100.0% | 170,000.0 x 1 | 698 | 1490 | c0ffee |",
        "| prefill.explained_W1 | 0.975 share |  |  |  |  | c0ffee |",
    ]
    assert report.joules({}) == "Not measured yet.\n"


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


def test_figures_are_kept_other_lines_pass_and_the_tables_follow(monkeypatch, capsys, results):
    figure = {name: "x" for name in record.REQUIRED} | {"metric": "a.b"}
    assert recorded(monkeypatch, "python bench.py", json.dumps(figure)) == 0
    assert [json.loads(line) for line in results[0].read_text().splitlines()] == [figure]
    assert "python bench.py" in capsys.readouterr().out and results[1] == [1]


def test_a_figure_takes_the_place_of_the_one_before(monkeypatch, results):
    first, other = ({name: "x" for name in record.REQUIRED} | {"metric": name} for name in ("a.b", "c.d"))
    newer = first | {"value": "y"}
    for figure in (first, other, newer):
        assert recorded(monkeypatch, json.dumps(figure)) == 0
    assert [json.loads(line) for line in results[0].read_text().splitlines()] == [other, newer]


def test_a_figure_that_lacks_its_commit_is_refused_and_no_figure_is_an_error(monkeypatch, results):
    figure = {name: "x" for name in record.REQUIRED} | {"metric": "a.b", "commit": None}
    with pytest.raises(ValueError, match=r"a\.b lacks commit"):
        recorded(monkeypatch, json.dumps(figure))
    assert recorded(monkeypatch, "nothing came of it") == 1
    assert results[1] == []
