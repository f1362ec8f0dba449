"""Rows of other makes: OpenAI's lines of a batch, CSV, standard input; and lines that are no rows."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.answering_server import PROBE, AnsweringServer
from jobs.batch_runs import results

from tessera_client import InvalidRequest
from tessera_jobs.source import row_fields

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


def test_csv(batch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_file_without_a_single_row_is_refused(batch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"picture": "a.jpg"}\n' * 3)
    assert batch(AnsweringServer(), tmp_path / "jobs.jsonl", "--prompt", "Why?") == 2
    assert "line 1: it has no field 'image', only picture" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()
