"""`tessera batch` from rows to results, a stand-in in the server's place."""

import errno
import fcntl
import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clients.fake_transport import SCORES, final
from fakes.answering_server import PROBE, AnsweringServer
from jobs.batch_runs import Capture, ids, questions, results, write_rows

from tessera_client import ConnectionFailed, InvalidRequest, PicturePlan, PictureView, ServerError
from tessera_client.messages import Cascade, Request
from tessera_command import jobs
from tessera_command.terminal import Health
from tessera_jobs import job, source
from tessera_jobs.journal import Journal
from tessera_jobs.source import JsonLinesSource


def test_rows_become_results(batch: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SYNC_S", -1)  # each result is on the disk before the next
    audited = {"cascade_audits": 40, "cascade_disagreements": 2}
    page = Health("ready", "", 0, "", alarm="answers escalated: 9 of the last 90", **audited)
    monkeypatch.setattr(jobs, "supervised", lambda url: page)
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    rows = write_rows(
        tmp_path / "jobs.jsonl",
        {"id": "one", "image": "a.jpg", "room": "attic"},
        {"id": "two", "image": ["a.jpg", "data:image/png;base64,cG5n"], "question": "Same?"},
        {"id": "three", "image": None, "question": "Why?", "options": {"max_tokens": 9}},
    )
    escalated = replace(final("answer to Same?"), cascade=Cascade(0.5, True))
    server = AnsweringServer(**{"Why?": [replace(final("yes"), choices=SCORES, logprobs=[1])], "Same?": [escalated]})
    assert batch(server, rows, "--prompt", "A crack?", "--max-tokens", "5", "--priority", "7") == 0
    sent = {request.text: request for request, *_ in server.requests if request.text != PROBE}
    assert [sent[text].images for text in ("A crack?", "Same?", "Why?")] == [(b"jpeg",), (b"jpeg", b"png"), ()]
    asked = {text: json.loads(request.sampling or "") for text, request in sent.items()}
    (pool,) = {each.pop("draft_pool") for each in asked.values()}
    assert pool and asked["A crack?"] == {"max_tokens": 5, "priority": 7}
    assert asked["Why?"] == {"max_tokens": 9, "priority": 7}
    one, two, three = sorted(results(tmp_path / "out.jsonl"), key=lambda row: ("one", "two", "three").index(row["id"]))
    assert (one["answer"], one["error"], one["finish_reason"]) == ("answer to A crack?", None, "stop")
    assert [one[f"{kind}_tokens"] for kind in ("prompt", "image", "completion")] == [10, 4, 2]
    assert two["answer"] == "answer to Same?" and [score["label"] for score in three["choices"]] == ["yes", "not sure"]
    assert three["logprobs"] == [1] and "cascade" not in three
    assert two["cascade"] == {"margin": 0.5, "escalated": True}
    shown = capsys.readouterr()
    told = ", 1 of 1 cascades escalated, 2 of the server's 40 audits so far disagreed\n"
    assert shown.out.startswith("3 rows in ") and shown.out.endswith(told)
    rates = [float(rate) for rate in re.findall(r"([\d.]+) pictures/s", shown.err + shown.out)]
    assert len(rates) >= 2 and all(0 < rate < 1e6 for rate in rates)  # of some milliseconds
    assert "passed over in" in shown.err and "room\n" in shown.err
    assert shown.err.endswith("the server's cascade is not as planned: answers escalated: 9 of the last 90\n")


def test_the_same_command_goes_on_where_it_ended(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    rows, out = questions(tmp_path, "a", "b", "c"), tmp_path / "out.jsonl"
    assert batch(AnsweringServer(), rows) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[1] + lines[2][:-5])  # as a kill in the middle of a write leaves it
    again = AnsweringServer()
    assert batch(again, rows) == 0
    kept = json.loads(lines[1])["id"]
    assert sorted(again.asked) == sorted({"a", "b", "c"} - {kept}) and sorted(ids(out)) == ["a", "b", "c"]
    assert out.read_bytes().startswith(lines[1]) and "1 were there already" in capsys.readouterr().out
    nothing = AnsweringServer()
    assert batch(nothing, rows) == 0 and nothing.requests == []
    # Rows may be added, and asked in another turn; a dry run knows them.
    more, before = AnsweringServer(), out.read_bytes()
    rows = questions(tmp_path, "d", "c", "b", "a")
    assert batch(more, rows, "--dry-run") == 0 and more.asked == ["d"] and out.read_bytes() == before
    assert "1 rows to ask, 3 of 4 are over" in capsys.readouterr().err
    assert batch(more, rows, "--priority", "3") == 0
    assert more.asked == ["d", "d"] and sorted(ids(out)) == ["a", "b", "c", "d"]


def test_what_fails_is_a_row_with_its_reason(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    rows = write_rows(
        tmp_path / "jobs.jsonl",
        {"image": None, "question": "good"},
        {"image": "nowhere.jpg", "question": "gone"},
        {"image": None, "question": "refused"},
        {"image": None, "question": "broken"},
        {"image": None, "question": "cut"},
    )
    own = {"refused": [InvalidRequest("not a\npicture")], "broken": [ServerError("out of luck")]}
    server = AnsweringServer(**own, cut=[final("half", "deadline")])
    assert batch(server, rows) == 1
    found = {row["id"]: row["error"] for row in results(tmp_path / "out.jsonl")}
    assert found[1] is None and found[3] == "InvalidRequest: not a picture" and found[4] == "ServerError: out of luck"
    assert found[2].startswith("InvalidRequest: cannot read the picture") and "No such file" in found[2]
    assert found[5].startswith("DeadlineExceeded: ")
    assert server.asked.count("refused") == 1 and server.asked.count("broken") == server.asked.count("cut") == 2
    assert "4 rows of" in capsys.readouterr().err
    # They are over, and stay so until they are asked for again.
    later = AnsweringServer()
    assert batch(later, rows) == 1 and later.requests == []
    assert batch(later, rows, "--again") == 1
    assert sorted(later.asked) == ["broken", "cut", "refused"]
    assert {row["id"]: row["error"] is None for row in results(tmp_path / "out.jsonl")} == {
        number: number != 2 for number in range(1, 6)
    }


def test_equal_questions_about_equal_pictures_are_asked_once(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    for name, content in (("a", b"same"), ("b", b"same"), ("c", b"other")):
        (tmp_path / f"{name}.jpg").write_bytes(content)
    asked = [("a", "x"), ("b", "x"), ("c", "x"), ("a", "y"), ("a", "x")]
    rows: list[Any] = [{"image": f"{name}.jpg", "question": question} for name, question in asked]
    rows += [{"image": None, "question": "free", "options": {"temperature": 1.0}}] * 2
    source, server = write_rows(tmp_path / "jobs.jsonl", *rows), AnsweringServer()
    assert batch(server, source, "--in-order") == 0 and sorted(server.asked) == ["free", "free", "x", "x", "y"]
    assert "2 the same as another" in capsys.readouterr().out
    found = results(tmp_path / "out.jsonl")
    assert [row["answer"] for row in found] == [f"answer to {row['question']}" for row in rows]
    same = [row.get("same_as") for row in found]
    equal = [same[0], same[1], same[4]]  # one of these was asked, whichever came first
    assert same[2:4] == [None, None] and sorted(equal, key=str) == [found[same.index(None)]["id"]] * 2 + [None]
    # Answers of an earlier run count as well.
    write_rows(source, *rows, {"image": "b.jpg", "question": "y"})
    later = AnsweringServer()
    assert batch(later, source) == 0 and later.asked == []
    assert results(tmp_path / "out.jsonl")[-1]["same_as"] == 4


def test_results_in_order(batch: Any, tmp_path: Path) -> None:
    names = [f"q{number}" for number in range(30)]
    rows, out = questions(tmp_path, *names), tmp_path / "out.jsonl"
    assert batch(AnsweringServer(), rows) == 0
    lines = sorted(out.read_bytes().splitlines(keepends=True), key=lambda line: int(json.loads(line)["id"][1:]))
    out.write_bytes(b"".join(reversed(lines)))
    assert batch(AnsweringServer(), rows, "--in-order") == 0 and out.read_bytes() == b"".join(lines)


def test_results_of_another_job_are_not_taken(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    rows, out = write_rows(tmp_path / "a.jsonl", {"image": None}), tmp_path / "out.jsonl"
    assert batch(AnsweringServer(), rows, "--prompt", "one") == 0
    before = out.read_bytes()
    server = AnsweringServer()
    assert batch(server, rows, "--prompt", "two") == 2
    assert "has a result of row 1, which this job does not ask, or asks otherwise" in capsys.readouterr().err
    assert batch(server, rows, "--prompt", "one", "--max-tokens", "7") == 2
    failed = before.replace(b'"error": null', b'"error": "why"').replace(b'"answer to one"', b"null")
    out.write_bytes(failed)
    assert batch(server, rows, "--prompt", "two", "--again") == 2 and out.read_bytes() == failed
    capsys.readouterr()
    out.write_bytes(before * 2)
    assert batch(server, rows, "--prompt", "one") == 2 and "has a result of row 1, twice" in capsys.readouterr().err
    out.write_text("my notes\n")
    assert batch(server, rows, "--prompt", "one") == 2 and "something else than results" in capsys.readouterr().err
    assert server.requests == [] and out.read_text() == "my notes\n"


def test_two_runs_do_not_write_one_file_and_a_disk_without_locks_is_said(
    batch: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    server, rows = AnsweringServer(), questions(tmp_path, "a")
    with closing(Journal(tmp_path / "out.jsonl")):
        assert batch(server, rows) == 2 and "another run is writing" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        assert batch(server, rows) == 1 and not server.requests
    said = capsys.readouterr().err
    assert "out.jsonl cannot be locked against other runs: No locks available; give an -o" in said
    assert batch(server, rows) == 0


def test_a_server_that_is_away_ends_the_run_and_keeps_what_is_over(
    batch: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(AnsweringServer):
        def answer_to(self, request: Request) -> Sequence[Any]:
            return [ConnectionFailed("gone")] if len(self.requests) > 3 else super().answer_to(request)

    rows = questions(tmp_path, "a", "b", "c", "d")
    assert batch(Leaving(), rows, "--concurrency", "1", "--patience", "0") == 3
    assert "tessera batch: gone" in capsys.readouterr().err and ids(tmp_path / "out.jsonl") == ["a", "b"]
    away = AnsweringServer(**{PROBE: [ConnectionFailed("nobody listens")]})
    assert batch(away, rows, "--patience", "0") == 3 and away.asked == []
    again = AnsweringServer()
    assert batch(again, rows) == 0 and sorted(again.asked) == ["c", "d"]


def test_the_output_is_named_for_what_it_is(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    rows = questions(tmp_path, "a")
    for arguments, words in (
        ((rows, "-o", tmp_path / "out.csv"), "cannot be written as out.csv"),
        ((rows, "-o", rows), "is where the rows come from"),
    ):
        assert batch(AnsweringServer(), *arguments) == 2 and words in capsys.readouterr().err
    (tmp_path / "full").write_text("")
    assert batch(AnsweringServer(), rows, "-o", tmp_path / "full" / "out.jsonl") == 1


class Planning(AnsweringServer):
    def plan(self, request: Request, timeout: float | None) -> tuple[PicturePlan, ...]:
        assert json.loads(request.sampling or "")["tile_policy"] == {"max_tiles": 6}
        views = (PictureView(896, 1344, 3, 2), PictureView(448, 448, 1, 1))
        return tuple(PicturePlan(1792, "tiles", (), views) for _ in request.images)


def test_a_dry_run_says_what_it_costs_and_writes_nothing(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    rows = write_rows(tmp_path / "jobs.jsonl", *({"image": ["a.jpg"] * 2, "question": f"q{n}"} for n in range(40)))
    server = Planning(q39=[InvalidRequest("last")], q0=[InvalidRequest("odd")])
    assert batch(server, rows, "--dry-run", "--max-tiles", "6", "--concurrency", "3") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert len(server.asked) == 12 == found["sample"] and {"q0", "q39"} < set(server.asked)
    assert (found["rows"], found["left"], found["failed"], found["units"], found["unit"]) == (40, 40, 2, 14.0, "tiles")
    assert (found["pictures"], found["image_tokens"], found["prompt_tokens"], found["answer_tokens"]) == (2, 4, 10, 2)
    assert found["minutes"] == pytest.approx(40 / found["rows_s"] / 60, abs=0.01)
    assert "560 tiles (14 a row)" in shown.err and "400 prompt tokens (10 a row)" in shown.err
    assert "2 of these 12 failed; the first: 1: odd" in shown.err and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("later", [["a", "x"], ["a", "b", "c"]])
def test_a_source_that_changes_while_it_is_read_is_noticed(
    batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, later: list[str]
) -> None:
    class Changing(JsonLinesSource):
        def rows(self, wanted: Any = None) -> Any:
            yield from super().rows(wanted)
            questions(tmp_path, *later)

    monkeypatch.setattr(source, "JsonLinesSource", Changing)
    assert batch(AnsweringServer(), questions(tmp_path, "a", "b")) == 2
    assert "changed while it was read" in capsys.readouterr().err
