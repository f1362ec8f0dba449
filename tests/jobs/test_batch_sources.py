"""What rows are made of: JSON lines, OpenAI's lines of a batch, CSV, folders, tables; and results as a table."""

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

from tessera_client import Cascade, InvalidRequest, ServerError
from tessera_jobs.journal import Journal
from tessera_jobs.source import open_source, row_fields

ASKED = ("A crack?", {"max_tokens": 5})


def rows_of(path: Path, wanted: Any = None) -> list[tuple[Any, ...]]:
    found = open_source(path, *ASKED).rows(wanted if wanted is None else np.array(wanted))
    return [(row.number, row.id, row.images, row.question) for row in found]


def test_json_lines(tmp_path: Path) -> None:
    given = ('{"image": "a/b.jpg"}', "", '{"image": null, "question": "Why?"}', '{"image": "/c.jpg"}')
    path = lines(tmp_path / "jobs.jsonl", *given)
    first, second, third = rows_of(path)
    assert first == (0, 1, (str(tmp_path / "a" / "b.jpg"),), "A crack?")
    assert second == (1, 3, (), "Why?")  # known by its line
    assert rows_of(path, [False, True, True]) == [second, third] and third[2] == ("/c.jpg",)


def a_batch_line(name: str, body: Any = None, **more: Any) -> dict[str, Any]:
    """As OpenAI has it; ``body``: what its body has too, or has instead where that is no object."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,anBlZw=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": name}, picture]}]
    body = {"model": "vlm", "messages": messages, **(body or {})} if isinstance(body, dict | None) else body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body, **more}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"image": "a.jpg"', "not JSON"),
        (["a.jpg"], "not a JSON object"),
        ({"imgae": "a.jpg"}, "it has no field 'image', only imgae"),
        ({"image": 7}, "its image must be a path"),
        ({"image": None, "question": ["Why?"]}, "its question must be text"),
        ({"image": None, "options": {"question": "Why?"}}, "its options must be an object"),
        ({"image": None, "id": "b"}, "it has an id, and rows before it have none"),
        (a_batch_line("a", url="/v1/embeddings"), "only POST /v1/chat/completions"),
        (a_batch_line("a", []), "its body must be an object"),
        (a_batch_line("a", {"messages": []}), "its body needs messages"),
        (a_batch_line("a", {"tools": [{}]}), "body.tools is not served here"),
        (a_batch_line("a", {"beams": 4}), "body.beams is not known here"),
        (a_batch_line("a", {"top_logprobs": 4}), "needs logprobs: true"),
        (a_batch_line("a", {"max_tokens": 4, "max_completion_tokens": 5}), "differ"),
        (a_batch_line("a", {"tessera": {"colour": 1}}), "body.tessera must be an object of choices"),
        (a_batch_line("a", room="attic"), "and no room"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: Any, words: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    good, bad = open_source(lines(tmp_path / "jobs.jsonl", '{"image": null}', text), *ASKED).rows()
    assert good.error is None and bad.id is None and str(bad.error).partition("line 2: ")[2].find(words) >= 0


@pytest.mark.parametrize("wrong", ["null", "true", "9223372036854775808"])
def test_an_id_is_text_or_a_whole_number(tmp_path: Path, wrong: str) -> None:
    (row,) = open_source(lines(tmp_path / "jobs.jsonl", f'{{"image": null, "id": {wrong}}}'), *ASKED).rows()
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


def write_table(path: Path, **columns: Any) -> Path:
    table = arrow.table(columns)
    parquet.write_table(table, path, row_group_size=-(-table.num_rows // 2))
    return path


def test_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "gone.jsonl", "no file or folder"),
        (lines(tmp_path / "a.txt"), "no source of rows"),
        (lines(tmp_path / "a.csv", "picture,question"), "needs a first line of names"),
        (lines(tmp_path / "t.parquet", "text"), "cannot be read as parquet"),
        (write_table(tmp_path / "u.parquet", picture=["a.jpg"]), "has no column 'image', only picture"),
        (tmp_path / "empty", "holds no pictures"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            rows_of(path)


def test_a_table_of_paths(tmp_path: Path) -> None:
    columns = {"id": [10, 11, None], "image": ["a.jpg", None, "data:image/png;base64,cG5n"], "width": [1, 2, 3]}
    path = write_table(tmp_path / "t.parquet", **columns, options=[{"max_tokens": 3}, None, {"max_tokens": None}])
    source = open_source(path, *ASKED)
    first, second, bad = source.rows()
    assert (first.id, first.images, second.images) == (10, (str(tmp_path / "a.jpg"),), ())
    assert [first.options["max_tokens"], second.options["max_tokens"]] == [3, 5]
    assert "row 3: its id must be" in str(bad.error) and list(source.passed_over) == ["width"]
    path = write_table(path, **{**columns, "id": [10, 11, 12]})
    assert rows_of(path, [False, False, True]) == [(2, 12, ("data:image/png;base64,cG5n",), "A crack?")]


def test_a_table_of_pictures(tmp_path: Path) -> None:
    pictures = [{"bytes": b"jpeg", "path": "a.jpg"}, {"bytes": None, "path": "b.jpg"}, None]
    path = write_table(tmp_path / "t.parquet", image=pictures)
    read = rows_of(path, [True] * 3)
    assert [row[1:3] for row in read] == [(1, (b"jpeg",)), (2, (str(tmp_path / "b.jpg"),)), (3, ())]
    # To know the rows, their pictures are not read; both ways they are the same rows.
    source = open_source(path, *ASKED)
    known = list(source.rows())
    assert [row.images for row in known] == [()] * 3
    assert [row.asked for row in known] == [row.asked for row in source.rows(np.ones(3, bool))]
    other = write_table(tmp_path / "other.parquet", image=[pictures[0], pictures[2], pictures[2]])
    assert not {row.asked for row in known} & {row.asked for row in open_source(other, *ASKED).rows()}
    several = write_table(tmp_path / "lists.parquet", image=[[b"one", b"two"], []])
    assert [row[2] for row in rows_of(several, [True, True])] == [(b"one", b"two"), ()]


@pytest.mark.parametrize("more", [(), ("--in-order",)])
def test_results_as_a_table(batch: Any, tmp_path: Path, more: tuple[str, ...]) -> None:
    names = ["odd", "b", "c"]
    source = write_table(tmp_path / "in.parquet", id=[3, 1, 2], image=[None] * 3, question=names)
    out, journal = tmp_path / "out.parquet", tmp_path / "out.parquet.jsonl"
    scored = [replace(final("b"), choices=SCORES, logprobs=[{"a": 1}], cascade=Cascade(2.5, False))]
    server = AnsweringServer(odd=[ServerError("out of luck")], b=scored)
    assert batch(server, source, "-o", tmp_path / "cut.jsonl", *more) == 1
    journal.write_bytes((tmp_path / "cut.jsonl").read_bytes()[:-5])  # as a killed run leaves it
    server.requests.clear()
    assert batch(server, source, "-o", out, *more) == 1
    assert len(server.asked) in (1, 2) and not journal.exists()  # a row that fails is asked twice
    found = {row["id"]: row for row in parquet.read_table(out).to_pylist()}
    assert found[1]["answer"] == "b" and found[1]["error"] is None and json.loads(found[1]["logprobs"]) == [{"a": 1}]
    assert [score["label"] for score in found[1]["choices"]] == ["yes", "not sure"]
    assert found[1]["cascade"] == {"margin": 2.5, "escalated": False} and found[2]["cascade"] is None
    assert found[3]["answer"] is None and found[3]["error"] == "ServerError: out of luck"
    assert list(found) == [3, 1, 2] or not more
    # A later run takes the table up again.
    later = AnsweringServer()
    assert batch(later, source, "-o", out, "--again", *more) == 0 and later.asked == ["odd"]
    again = {row["id"]: row for row in parquet.read_table(out).to_pylist()}
    assert again[3]["answer"] == "answer to odd" and {1: again[1], 2: again[2]} == {1: found[1], 2: found[2]}
    assert list(again) == [3, 1, 2] or not more


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


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (['{"id": "a", "image": null}', '{"id": "b", "image": null}'] * 2, "rows 1 and 3 have the same id 'a'"),
        (['{"id": "1", "image": null}', '{"id": 1, "image": null}'], "the id 1 of row 2 is no str"),
        (["", ""], "holds no rows"),
        (['{"picture": "a.jpg"}'] * 3, "line 1: it has no field 'image', only picture"),
    ],
)
def test_a_source_that_cannot_be_asked_is_refused(
    batch: Any, tmp_path: Path, capsys: Capture, texts: list[str], words: str
) -> None:
    assert batch(FakeTransport(), lines(tmp_path / "in.jsonl", *texts), "--prompt", "A crack?") == 2
    assert words in capsys.readouterr().err


def test_a_journal_that_was_cut_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = {"id": 1, "answer": "x" * 200_000, "error": None, "asked": "00000000000000ff"}
    with closing(Journal(path)) as journal:
        places = [journal.append(result), journal.append({**result, "answer": None, "error": "why"})]
        assert [line[0] for line in journal.lines()] == places and journal.at(0) == result
    whole = path.read_bytes()
    for rest in (b"{", b'{"id": 2, "answer": "' + b"y" * 300_000, b"\0\0"):
        path.write_bytes(whole + rest)
        with closing(Journal(path)) as journal:
            assert [(asked, answered) for _, asked, *_, answered, _ in journal.lines()] == [(255, True), (255, False)]
            assert journal.append(result) == len(whole)
        assert path.read_bytes() == whole + whole.splitlines(keepends=True)[0]
    for content in (b"no line end", b'{"id": 1, "text": "a"}\n{"id": 2', b"\n"):  # no journal: left as it was
        path.write_bytes(content)
        with closing(Journal(path)) as journal, pytest.raises(InvalidRequest, match="something else than results"):
            list(journal.lines())
        assert path.read_bytes() == content


def test_a_file_of_openais_batches_is_a_source(batch: Any, tmp_path: Path) -> None:
    first = a_batch_line("a", {"max_completion_tokens": 4, "response_format": {"type": "json_object"}})
    path = lines(tmp_path / "jobs.jsonl", *map(json.dumps, (first, a_batch_line("b", {"n": 2}), a_batch_line("c"))))
    server = AnsweringServer()
    assert batch(server, path, "--max-tokens", "9", "--in-order") == 1
    a, b, c = results(tmp_path / "out.jsonl")
    assert (a["id"], a["answer"], c["id"], c["answer"]) == ("a", "answer to a", "c", "answer to c")
    assert b["id"] is None and "line 2: body.n is not served here" in b["error"]
    sent = [request for request, *_ in server.requests if request.messages]
    assert [request.images for request in sent] == [(b"jpeg",)] * 2
    options = [json.loads(request.sampling or "") for request in sent]
    own = {"priority": 10, "draft_pool": options[0]["draft_pool"]}
    assert {"max_tokens": 4, "json_object": True, **own} in options
    assert {"max_tokens": 9, **own} in options
    again = AnsweringServer()
    assert batch(again, path, "--max-tokens", "9") == 1 and again.asked == []


def test_options_of_a_line_of_a_batch() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"logprobs": True, "top_logprobs": 2, "response_format": schema, "tessera": {"tile_policy": "native"}}
    ignored = {"user": "me", "n": 1, "stream": False, "seed": None, "temperature": 0.5}
    assert row_fields(a_batch_line("a", {**body, **ignored}))["options"] == {
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
    for asked in (["one", "two"], []):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        server = AnsweringServer()
        assert batch(server, "-") == 0 and sorted(server.asked) == asked


def test_a_line_that_is_no_row_is_a_row_with_an_error(batch: Any, tmp_path: Path) -> None:
    given = ['{"id": 7, "image": null, "question": "good"}', '{"id": 8, "imgae": null}', "not JSON", '{"id": "x"}']
    path, server = lines(tmp_path / "jobs.jsonl", *given), AnsweringServer()
    assert batch(server, path, "--in-order") == 1 and server.asked == ["good"]
    good, *bad = results(tmp_path / "out.jsonl")
    assert good["id"] == 7 and [row["id"] for row in bad] == [None] * 3 and "line 3: not JSON" in bad[1]["error"]
    # They are over, and mended lines are asked.
    for after, asked, names in (
        ([given[0], *given[2:]], ["good"], [7, None, None]),
        ([given[0], '{"id": 8, "image": null, "question": "mended"}'], ["good", "mended"], [7, 8]),
    ):
        assert batch(server, lines(path, *after)) == (None in names) and server.asked == asked
        assert [row["id"] for row in results(tmp_path / "out.jsonl")] == names
