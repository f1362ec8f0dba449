"""What rows are made of: JSON lines, folders, tables; and results as a table."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from clients.fake_transport import SCORES, FakeTransport, final
from fakes.answering_server import AnsweringServer
from jobs.batch_runs import lines
from pyarrow import parquet

from tessera_client import InvalidRequest, ServerError
from tessera_jobs.job import Job, Settings
from tessera_jobs.journal import Journal
from tessera_jobs.rows import Asked
from tessera_jobs.source import open_source
from tessera_jobs.survey import Answers
from tessera_jobs.table import read_table

ASKED = Asked("A crack?", {"max_tokens": 5})


def rows_of(path: Path, wanted: Any = None) -> list[tuple[Any, ...]]:
    found = open_source(path, ASKED).rows(wanted if wanted is None else np.array(wanted))
    return [(row.number, row.id, row.images, row.question) for row in found]


def test_json_lines(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "jobs.jsonl",
        '{"image": "a/b.jpg"}',
        "",
        '{"image": null, "question": "Why?"}',
        '{"image": "/c.jpg"}',
    )
    first, second, third = rows_of(path)
    assert first == (0, 1, (str(tmp_path / "a" / "b.jpg"),), "A crack?")
    assert second == (1, 3, (), "Why?")  # known by its line
    assert rows_of(path, [False, True, True]) == [second, third] and third[2] == ("/c.jpg",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"image": "a.jpg"', "line 2: not JSON"),
        ('["a.jpg"]', "line 2: not a JSON object"),
        ('{"imgae": "a.jpg"}', "line 2: it has no field 'image', only imgae"),
        ('{"image": 7}', "line 2: its image must be a path"),
        ('{"image": null, "question": ["Why?"]}', "line 2: its question must be text"),
        ('{"image": null, "options": "fast"}', "line 2: its options must be an object"),
        ('{"image": null, "options": {"question": "Why?"}}', "line 2: its options must be an object"),
        ('{"image": null, "id": "b"}', "line 2: it has an id, and rows before it have none"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, text: str, words: str) -> None:
    good, bad = open_source(lines(tmp_path / "jobs.jsonl", '{"image": null}', text), ASKED).rows()
    assert good.error is None and bad.id is None and bad.error is not None and words in str(bad.error)


@pytest.mark.parametrize("wrong", ["null", "true", "1.5", "[1]", "9223372036854775808"])
def test_an_id_is_text_or_a_whole_number(tmp_path: Path, wrong: str) -> None:
    (row,) = open_source(lines(tmp_path / "jobs.jsonl", f'{{"image": null, "id": {wrong}}}'), ASKED).rows()
    assert "its id must be" in str(row.error)


def test_a_folder(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "below/c.webp", ".hidden.jpg", ".git/d.jpg", "notes.txt"):
        path = tmp_path / "rooms" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    found = rows_of(tmp_path / "rooms")
    assert [row[1] for row in found] == ["a.png", "b.JPG", "below/c.webp"]
    assert found[2][2] == (str(tmp_path / "rooms" / "below" / "c.webp"),)
    assert rows_of(tmp_path / "rooms", [False, True, False]) == [found[1]]
    with pytest.raises(InvalidRequest, match="holds no pictures"):
        rows_of((tmp_path / "rooms" / "below" / "c.webp").unlink() or tmp_path / "rooms" / "below")


def test_what_is_no_source(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "gone.jsonl", "no file or folder"),
        (lines(tmp_path / "a.txt"), "no source of rows"),
        (lines(tmp_path / "a.csv", "picture,question"), "needs a first line of names"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            open_source(path, ASKED)


def write_table(path: Path, groups: int = 2, **columns: Any) -> Path:
    table = arrow.table(columns)
    parquet.write_table(table, path, row_group_size=-(-table.num_rows // groups))
    return path


def test_a_table_of_paths(tmp_path: Path) -> None:
    columns = {"id": [10, 11, 12], "image": ["a.jpg", None, "data:image/png;base64,cG5n"], "width": [1, 2, 3]}
    path = write_table(tmp_path / "t.parquet", **columns, options=[{"max_tokens": 3}, None, {"max_tokens": None}])
    found = rows_of(path)
    assert [row[1] for row in found] == [10, 11, 12] and found[1][2] == ()
    assert found[0][2] == (str(tmp_path / "a.jpg"),) and found[2][2] == ("data:image/png;base64,cG5n",)
    assert rows_of(path, [False, False, True]) == [found[2]]
    source = open_source(path, ASKED)
    assert list(source.passed_over) == ["width"]
    assert [dict(row.options)["max_tokens"] for row in source.rows()] == [3, 5, None]


def test_a_table_of_pictures(tmp_path: Path) -> None:
    pictures = [{"bytes": b"jpeg", "path": "a.jpg"}, {"bytes": None, "path": "b.jpg"}, None]
    path = write_table(tmp_path / "t.parquet", image=pictures)
    read = rows_of(path, [True] * 3)
    assert [row[1:3] for row in read] == [(1, (b"jpeg",)), (2, (str(tmp_path / "b.jpg"),)), (3, ())]
    # To know the rows, their pictures are not read; both ways they are the same rows.
    source = open_source(path, ASKED)
    known = list(source.rows())
    assert [row.images for row in known] == [()] * 3
    assert [row.asked for row in known] == [row.asked for row in source.rows(np.ones(3, bool))]
    other = write_table(tmp_path / "other.parquet", image=[pictures[0], pictures[2], pictures[2]])
    assert not {row.asked for row in known} & {row.asked for row in open_source(other, ASKED).rows()}
    several = write_table(tmp_path / "lists.parquet", image=[[b"one", b"two"], []])
    assert [row[2] for row in rows_of(several, [True, True])] == [(b"one", b"two"), ()]


def test_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read as parquet"):
        rows_of(lines(tmp_path / "t.parquet", "text"))
    with pytest.raises(InvalidRequest, match="has no column 'image', only picture"):
        rows_of(write_table(tmp_path / "u.parquet", picture=["a.jpg"]))
    _, bad = open_source(write_table(tmp_path / "v.parquet", image=["a.jpg", "b.jpg"], id=["a", None]), ASKED).rows()
    assert "row 2: its id must be" in str(bad.error)


@pytest.mark.parametrize("more", [(), ("--in-order",)])
def test_results_as_a_table(batch: Any, tmp_path: Path, more: tuple[str, ...]) -> None:
    names = ["odd", "b", "c"]
    source = write_table(tmp_path / "in.parquet", id=[3, 1, 2], image=[None] * 3, question=names)
    out = tmp_path / "out.parquet"
    scored = [replace(final("b"), choices=SCORES, logprobs=[{"a": 1}])]
    server = AnsweringServer(odd=[ServerError("out of luck")], b=scored)
    assert batch(server, source, "-o", out, *more) == 1
    found = {row["id"]: row for row in parquet.read_table(out).to_pylist()}
    assert found[1]["answer"] == "b" and found[1]["error"] is None and json.loads(found[1]["logprobs"]) == [{"a": 1}]
    assert [score["label"] for score in found[1]["choices"]] == ["yes", "not sure"]
    assert found[3]["answer"] is None and found[3]["error"] == "ServerError: out of luck"
    assert list(found) == [3, 1, 2] or not more
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]
    # A later run takes the table up again.
    later = FakeTransport()
    assert batch(later, source, "-o", out, "--again", *more) == 0
    assert [request.text for request, *_ in later.requests] == ["Hello", "odd"]
    again = {row["id"]: row for row in parquet.read_table(out).to_pylist()}
    assert again[3]["answer"] == "answer to odd" and {1: again[1], 2: again[2]} == {1: found[1], 2: found[2]}
    assert list(again) == [3, 1, 2] or not more


def test_a_table_that_was_not_finished_has_its_journal_beside(batch: Any, tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.parquet", image=[None] * 3, question=["a", "b", "c"])
    out = tmp_path / "out.jsonl"
    assert batch(FakeTransport(), source, "-o", out) == 0
    journal = tmp_path / "out.parquet.jsonl"
    journal.write_bytes(out.read_bytes()[:-5])  # as a killed run leaves it
    later = FakeTransport()
    assert batch(later, source, "-o", tmp_path / "out.parquet") == 0
    assert len(later.requests) == 2 and not journal.exists()
    assert sorted(row["id"] for row in read_table(tmp_path / "out.parquet")) == [1, 2, 3]


def test_a_name_that_is_no_utf8_can_stand_in_a_table(batch: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"png")
    for out in ("out.jsonl", "out.parquet"):
        for asked in (2, 0):  # it is known again
            server = FakeTransport()
            assert batch(server, tmp_path / "in", "--prompt", "A cat?", "-o", tmp_path / out) == 0
            assert len(server.requests) == asked
    assert parquet.read_table(tmp_path / "out.parquet")["id"].to_pylist() == ["caf?.png"]


def test_another_table_is_not_taken_for_results(batch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write_table(tmp_path / "out.parquet", image=["a.jpg"])
    before = out.read_bytes()
    source = lines(tmp_path / "in.jsonl", '{"image": null, "question": "a"}')
    assert batch(FakeTransport(), source, "-o", out) == 2
    assert "something else than results" in capsys.readouterr().err and out.read_bytes() == before


def test_without_pyarrow_the_way_to_get_it_is_said(
    batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tessera_jobs.table")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = lines(tmp_path / "in.jsonl", '{"image": null, "question": "a"}')
    server = FakeTransport()
    assert batch(server, source, "-o", tmp_path / "out.parquet") == 1
    assert "pip install '.[tables]'" in capsys.readouterr().err and server.requests == []


def survey(path: Path, tmp_path: Path) -> Any:
    job = Job(open_source(path, ASKED), tmp_path / "out.jsonl", Settings("nowhere"))
    with pytest.raises(InvalidRequest) as caught:
        job.run()
    return str(caught.value)


def test_ids_that_stand_twice_are_named(tmp_path: Path) -> None:
    twice = ['{"id": "a", "image": null}', '{"id": "b", "image": null}', '{"id": "a", "image": "x.jpg"}']
    assert "rows 1 and 3 have the same id 'a'" in survey(lines(tmp_path / "a.jsonl", *twice), tmp_path)
    mixed = ['{"id": "1", "image": null}', '{"id": 1, "image": null}']
    assert "the id 1 of row 2 is no str" in survey(lines(tmp_path / "b.jsonl", *mixed), tmp_path)
    assert "holds no rows" in survey(lines(tmp_path / "c.jsonl", "", ""), tmp_path)


def test_a_journal_that_was_cut_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = {"id": 1, "answer": "x" * 200_000, "error": None, "asked": "00000000000000ff"}
    journal = Journal(path)
    places = [journal.append(result), journal.append({**result, "answer": None, "error": "why"})]
    assert [line[0] for line in journal.lines()] == places and journal.at(0) == result
    journal.close()
    whole = path.read_bytes()
    for rest in (b"{", b'{"id": 2, "answer": "' + b"y" * 300_000, b"\0\0"):
        path.write_bytes(whole + rest)
        with closing(Journal(path)) as journal:
            assert [line[1:4:2] for line in journal.lines()] == [
                (b"00000000000000ff", True),
                (b"00000000000000ff", False),
            ]
            assert journal.append(result) == len(whole)
        assert path.read_bytes() == whole + whole.splitlines(keepends=True)[0]


def test_what_is_no_journal_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for content in (b"no line end", b'{"id": 1, "text": "a"}\n{"id": 2', b"\n"):
        path.write_bytes(content)
        with closing(Journal(path)) as journal, pytest.raises(InvalidRequest, match="something else than results"):
            list(journal.lines())
        assert path.read_bytes() == content


def test_places_of_answers_by_digest() -> None:
    answers = Answers(100)
    digests = [f"{number << 8:016x}{number:016x}" for number in range(100)]  # which share their lowest bits
    for place, digest in enumerate(digests):
        answers.put(digest, place)
    assert [answers.get(digest) for digest in digests] == list(range(100))
    assert answers.get("f" * 32) is None
