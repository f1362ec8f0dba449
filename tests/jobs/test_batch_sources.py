"""What rows are made of: JSON lines, OpenAI's lines of a batch, CSV, folders, tables; and results as a table."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from clients.fake_transport import SCORES, FakeTransport, final
from fakes.answering_server import PROBE, AnsweringServer
from jobs.batch_runs import Capture, lines, results
from pyarrow import parquet

from tessera_client import InvalidRequest, ServerError
from tessera_jobs.job import Job, Settings
from tessera_jobs.journal import Journal
from tessera_jobs.resume_index import Answers
from tessera_jobs.rows import Asked
from tessera_jobs.source import open_source, row_fields
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


def test_another_table_is_not_taken_for_results(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    out = write_table(tmp_path / "out.parquet", image=["a.jpg"])
    before = out.read_bytes()
    source = lines(tmp_path / "in.jsonl", '{"image": null, "question": "a"}')
    assert batch(FakeTransport(), source, "-o", out) == 2
    assert "something else than results" in capsys.readouterr().err and out.read_bytes() == before


def test_without_pyarrow_the_way_to_get_it_is_said(
    batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.delitem(sys.modules, "tessera_jobs.table")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source = lines(tmp_path / "in.jsonl", '{"image": null, "question": "a"}')
    server = FakeTransport()
    assert batch(server, source, "-o", tmp_path / "out.parquet") == 1
    assert "pip install '.[tables]'" in capsys.readouterr().err and server.requests == []


def refusal(path: Path, tmp_path: Path) -> Any:
    job = Job(open_source(path, ASKED), tmp_path / "out.jsonl", Settings("nowhere"))
    with pytest.raises(InvalidRequest) as caught:
        job.run()
    return str(caught.value)


def test_ids_that_stand_twice_are_named(tmp_path: Path) -> None:
    twice = ['{"id": "a", "image": null}', '{"id": "b", "image": null}', '{"id": "a", "image": "x.jpg"}']
    assert "rows 1 and 3 have the same id 'a'" in refusal(lines(tmp_path / "a.jsonl", *twice), tmp_path)
    mixed = ['{"id": "1", "image": null}', '{"id": 1, "image": null}']
    assert "the id 1 of row 2 is no str" in refusal(lines(tmp_path / "b.jsonl", *mixed), tmp_path)
    assert "holds no rows" in refusal(lines(tmp_path / "c.jsonl", "", ""), tmp_path)


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


URL = "data:image/jpeg;base64,anBlZw=="


def line(name: str, **body: Any) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": URL}}
    messages = [{"role": "user", "content": [{"type": "text", "text": name}, picture]}]
    body = {"model": "vlm", "messages": messages, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_a_file_of_openais_batches_is_a_source(batch: Any, tmp_path: Path) -> None:
    rows = [line("a", max_completion_tokens=4, response_format={"type": "json_object"}), line("b", n=2), line("c")]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = AnsweringServer()
    assert batch(server, tmp_path / "jobs.jsonl", "--max-tokens", "9", "--in-order") == 1
    a, b, c = results(tmp_path / "out.jsonl")
    assert (a["id"], a["answer"], c["id"], c["answer"]) == ("a", "answer to a", "c", "answer to c")
    assert b["id"] is None and "line 2: body.n is not served here" in b["error"]
    sent = {server_text: request for request, *_ in server.requests if (server_text := request.messages)}
    assert all(request.images == (b"jpeg",) for request in sent.values()) and len(sent) == 2
    options = [json.loads(request.sampling or "") for request in sent.values()]
    assert {"max_tokens": 4, "json_object": True, "priority": 10} in options
    assert {"max_tokens": 9, "priority": 10} in options
    again = AnsweringServer()
    assert batch(again, tmp_path / "jobs.jsonl", "--max-tokens", "9") == 1 and again.asked == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "/v1/embeddings"}, "only POST /v1/chat/completions"),
        ({"method": "GET"}, "only POST"),
        ({"body": []}, "its body must be an object"),
        ({"body": {"messages": []}}, "its body needs messages"),
        ({"body": {"messages": [{}], "tools": [{}]}}, "body.tools is not served here"),
        ({"body": {"messages": [{}], "beams": 4}}, "body.beams is not known here"),
        ({"body": {"messages": [{}], "top_logprobs": 4}}, "needs logprobs: true"),
        ({"body": {"messages": [{}], "max_tokens": 4, "max_completion_tokens": 5}}, "differ"),
        ({"body": {"messages": [{}], "response_format": {"type": "xml"}}}, "body.response_format"),
        ({"body": {"messages": [{}], "tessera": {"colour": 1}}}, "body.tessera must be an object of choices"),
        ({"room": "attic"}, "and no room"),
    ],
)
def test_what_a_line_of_a_batch_may_not_hold_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        row_fields({**line("a"), **change})


def test_options_of_a_line_of_a_batch() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"logprobs": True, "top_logprobs": 2, "response_format": schema, "tessera": {"tile_policy": "native"}}
    ignored = {"user": "me", "n": 1, "stream": False, "seed": None, "temperature": 0.5}
    assert row_fields(line("a", **body, **ignored))["options"] == {
        "logprobs": 2,
        "json_schema": {"type": "object"},
        "tile_policy": "native",
        "temperature": 0.5,
    }


def test_csv(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    rows = [
        "id,image,question,options,room",
        'one,a.jpg,"Is there\na ""crack""?",,attic',
        'two,,Why?,"{""max_tokens"": 3}",',
    ]
    (tmp_path / "rows.csv").write_text("\ufeff" + "\r\n".join([*rows, "three,a.jpg", "four,a.jpg,,{,", ""]))
    server = AnsweringServer()
    assert batch(server, tmp_path / "rows.csv", "--prompt", "A crack?", "--in-order") == 1
    sent = {request.text: request for request, *_ in server.requests if request.text != PROBE}
    assert sent['Is there\na "crack"?'].images == (b"jpeg",) and sent["Why?"].images == ()
    assert json.loads(sent["Why?"].sampling or "")["max_tokens"] == 3
    one, two, three, four = results(tmp_path / "out.jsonl")
    assert (one["id"], two["id"], three["id"], four["id"]) == ("one", "two", None, None)
    assert "row 3: it has 2 cells; the first line names 5" in three["error"] and "row 4: not JSON" in four["error"]
    assert "rows.csv: room\n" in capsys.readouterr().err


def test_standard_input(batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    monkeypatch.chdir(tmp_path)
    text = '{"image": "a.jpg", "question": "one"}\n{"image": null, "question": "two"}\n'

    def given() -> Any:
        return SimpleNamespace(buffer=io.BytesIO(text.encode()))

    monkeypatch.setattr(sys, "stdin", given())
    server = AnsweringServer()
    assert batch(server, "-") == 0 and sorted(server.asked) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", given())
    again = AnsweringServer()
    assert batch(again, "-") == 0 and again.asked == []


def test_a_line_that_is_no_row_is_a_row_with_an_error(batch: Any, tmp_path: Path) -> None:
    lines = ['{"id": 7, "image": null, "question": "good"}', '{"id": 8, "imgae": null}', "not JSON", '{"id": "x"}']
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    server = AnsweringServer()
    assert batch(server, tmp_path / "jobs.jsonl", "--in-order") == 1 and server.asked == ["good"]
    good, *bad = results(tmp_path / "out.jsonl")
    assert good["id"] == 7 and [row["id"] for row in bad] == [None] * 3
    assert ["line 2: it has no field 'image'" in bad[0]["error"], "line 3: not JSON" in bad[1]["error"]] == [True] * 2
    # They are over, and mended lines are asked.
    (tmp_path / "jobs.jsonl").write_text("\n".join([lines[0], *lines[2:]]))
    assert batch(server, tmp_path / "jobs.jsonl") == 1 and server.asked == ["good"]
    assert [row["id"] for row in results(tmp_path / "out.jsonl")] == [7, None, None]
    (tmp_path / "jobs.jsonl").write_text(lines[0] + '\n{"id": 8, "image": null, "question": "mended"}\n')
    assert batch(server, tmp_path / "jobs.jsonl") == 0 and server.asked == ["good", "mended"]
    assert [row["id"] for row in results(tmp_path / "out.jsonl")] == [7, 8]


def test_a_file_without_a_single_row_is_refused(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"picture": "a.jpg"}\n' * 3)
    assert batch(AnsweringServer(), tmp_path / "jobs.jsonl", "--prompt", "Why?") == 2
    assert "line 1: it has no field 'image', only picture" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()
