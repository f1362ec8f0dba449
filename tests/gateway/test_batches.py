"""Batches by OpenAI's own client over a real port; the servers behind the gateway play a script.

And a gateway's process that is killed in the middle of a batch.
"""

import json
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest
from clients.fake_transport import FakeTransport, Hang
from fakes.answering_server import PROBE, AnsweringServer, question
from gateway_doubles import Asked, answers, client_of, create, line, over, rows, served, started, until, upload

from tessera_client import ConnectionFailed, InvalidRequest, Unavailable
from tessera_gateway import translation
from tessera_gateway.batches import jobs, runner, service
from tessera_gateway.batches.database import Database
from tessera_gateway.errors import ApiError
from tessera_gateway.settings import Settings
from tessera_jobs import asker


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(service, "AGAIN_S", 0.0)
    monkeypatch.setattr(asker, "PAUSE_S", 0)


Serve = Callable[..., openai.OpenAI]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a gateway before a server, and gives OpenAI's client of it."""
    with ExitStack() as ends:

        def start(server: FakeTransport, **settings: Any) -> openai.OpenAI:
            _, address = ends.enter_context(served(fake=server, batch_folder=tmp_path / "batches", **settings))
            return ends.enter_context(client_of(address))

        yield start


def test_every_line_has_one_result(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of people go first, and a line at which the gateway itself fails is a row of errors too."""
    real = translation.messages

    def messages(asked: Any, fetched: Any) -> Any:
        found = real(asked, fetched)
        if found[0]["content"][0]["text"] == "fault":
            raise ZeroDivisionError("a secret")
        return found

    monkeypatch.setattr(translation, "messages", messages)
    monkeypatch.setattr(runner, "BUSY_S", 0)
    full = Unavailable("512 requests are in flight")
    server = AnsweringServer(bad=[InvalidRequest("no picture")], busy=[full])
    client = serve(server, priority_floor=3)
    lines = [line("a"), line("b", "Ist das schön? 好", priority=99), "", line("c", "bad"), line("d", functions=[])]
    lines += [line("e", stream=True), line("f", "busy"), line("g", priority=2), line("h", "fault")]
    batch = create(client, *lines, metadata={"room": "7"})
    assert batch.status == "validating" and batch.metadata == {"room": "7"} and batch.errors is None
    batch = over(client, batch)
    assert batch.status == "completed" and batch.in_progress_at and batch.finalizing_at and batch.completed_at
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (8, 2, 6)
    assert answers(client, batch) == {"a": "answer to a", "b": "answer to Ist das schön? 好"}
    sent = {question(request): json.loads(request.sampling or "{}") for request, *_ in server.requests}
    assert (sent["a"]["priority"], sent["Ist das schön? 好"]["priority"]) == (10, 99)
    first = rows(client, batch.output_file_id)[0]
    assert first["error"] is None and first["id"].startswith("batch_req_") and first["response"]["status_code"] == 200
    assert first["response"]["body"]["usage"]["total_tokens"] == 12
    refused = {row["custom_id"]: row["response"] for row in rows(client, batch.error_file_id)}
    said = {name: (row["status_code"], row["body"]["error"]["message"]) for name, row in refused.items()}
    fault = "the gateway failed at this request; its log says why"
    assert said == {
        "c": (400, "no picture"),
        "d": (400, "functions is not supported by this server"),
        "e": (400, "stream is not possible in a batch"),
        "f": (429, str(full)),
        "g": (400, "priority is 2; here it may be 3 or more"),
        "h": (500, fault),
    }
    told = capsys.readouterr().err
    assert "a secret" in told and f"request {refused['h']['request_id']} failed:" in told


BAD: list[tuple[str, str | None, str]] = [
    ("nonsense", None, "the line is not JSON"),
    ("[" * 100_000, None, "the line is not JSON"),
    ('{"custom_id": "b"}', "b", "method: Field required"),
    (line("c").replace("completions", "embeddings"), "c", "url: Input should be"),
    (line("d").replace('"body": {', '"more": 1, "body": {'), "d", "more is not known"),
    (line("e").replace('"e"', "7", 1), None, "custom_id: Input should be a valid string"),
    (line("f" * 513), None, "custom_id: String should have at most 512"),
    ('{"custom_id": "%s"}' % ("g" * 512), "g" * 512, "method: Field required"),
    (line("a", "again"), None, "custom_id 'a' stands on line 1 already"),
]


def test_answers_of_one_batch_may_be_drafts_of_its_others_alone(serve: Serve) -> None:
    server = AnsweringServer()
    client = serve(server)
    for name in "ab":
        over(client, create(client, line(f"{name}1"), line(f"{name}2")))
    pools = {question(request): json.loads(request.sampling or "")["draft_pool"] for request, *_ in server.requests}
    assert pools["a1"] == pools["a2"] != pools["b1"] == pools["b2"]


def test_a_line_that_is_no_request_has_its_reason(serve: Serve) -> None:
    server = AnsweringServer()
    client = serve(server)
    batch = over(client, create(client, line("a"), *(bad for bad, _, _ in BAD), line("z")))
    for number, ((_, custom_id, words), row) in enumerate(zip(BAD, rows(client, batch.error_file_id), strict=True), 2):
        assert (row["custom_id"], row["response"], row["error"]["code"]) == (custom_id, None, "invalid_line")
        assert row["error"]["message"].startswith(f"line {number}: {words}")
    assert answers(client, batch).keys() == {"a", "z"} and sorted(server.asked) == ["a", "z"]


def test_a_file_without_a_line_fails_the_batch(serve: Serve) -> None:
    client = serve(AnsweringServer())
    for lines in ([], ["", " "]):
        batch = over(client, create(client, *lines))
        assert batch.status == "failed" and batch.failed_at and not batch.output_file_id and not batch.error_file_id
        assert batch.errors is not None and batch.errors.data is not None and batch.errors.data[0].code == "empty_file"
    with pytest.raises(openai.ConflictError, match="the batch is failed"):
        client.batches.cancel(batch.id)


def test_files(serve: Serve) -> None:
    client = serve(AnsweringServer())
    content = f"{line('a')}\r\n\r\n{line('b')}".encode() + b"\n\x00\xff"
    file = client.files.create(file=("räume.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == ("räume.jsonl", len(content), "batch", "processed")
    assert client.files.retrieve(file.id) == file and client.files.content(file.id).content == content
    more = [upload(client, line(str(number))) for number in range(4)]
    assert [each.id for each in client.files.list(limit=2)] == [*reversed(more), file.id]  # page after page
    page = client.files.list(limit=2, order="asc", purpose="batch", after=file.id)
    assert [each.id for each in page.data] == more[:2] and page.has_more
    assert client.files.list(purpose="batch_output").data == []
    batches = [create(client, line("a")) for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(batches)]
    done = over(client, batches[0])
    assert [client.files.retrieve(done.output_file_id or "").purpose] == ["batch_output"]
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file 'file-"):
            gone(file.id)
    with pytest.raises(openai.NotFoundError, match="no batch 'batch_x'"):
        client.batches.retrieve("batch_x")
    for limit in ("0", "-1", "x", "101"):
        with pytest.raises(openai.BadRequestError, match="limit must be from 1 to 100"):
            client.batches.list(extra_query={"limit": limit})


def test_what_no_batch_can_be_made_of(serve: Serve) -> None:
    client = serve(AnsweringServer())
    file = upload(client, line("a"))
    good = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"endpoint": "/v1/embeddings"}, "endpoint: Input should be"),
        ({"completion_window": "1 week"}, "completion_window: "),
        ({"completion_window": "0h"}, "completion_window: "),
        ({"metadata": {str(number): "" for number in range(17)}}, "at most 16"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after is not known"),
    ]
    for fields, words in refused:
        with pytest.raises(openai.BadRequestError, match=words):
            client.batches.create(**{**good, **fields})
    with pytest.raises(openai.NotFoundError, match="no file 'file-x'"):
        client.batches.create(**{**good, "input_file_id": "file-x"})  # type: ignore[arg-type]
    results = over(client, client.batches.create(**good)).output_file_id  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="the file's purpose is not 'batch'"):
        client.batches.create(**{**good, "input_file_id": results})  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError, match="application/json"):
        client.post("/batches", cast_to=object, content=b"{}", options={"headers": {"Content-Type": "text/plain"}})


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_a_batch_that_is_ended_keeps_what_it_has(serve: Serve, tmp_path: Path, ending: str) -> None:
    server = AnsweringServer(slow=[Hang()])
    client = serve(server, batch_concurrency=2)
    lines = line("a"), line("b", "slow"), line("c", "slow"), line("d"), "nonsense"
    batch = create(client, *lines, completion_window="1h")
    assert batch.expires_at == batch.created_at + 3600
    until(lambda: server.asked == ["a", "slow", "slow"])
    batch = client.batches.retrieve(batch.id)
    assert batch.status in ("validating", "in_progress") and batch.output_file_id is None
    with pytest.raises(openai.ConflictError, match="still reads this file: cancel it first"):
        client.files.delete(batch.input_file_id)
    if ending == "expired":
        with closing(sqlite3.connect(tmp_path / "batches" / "batches.sqlite", timeout=30)) as database, database:
            database.execute("UPDATE batches SET expires_at = 0")
    else:
        assert client.batches.cancel(batch.id).status == "cancelling"
    batch = over(client, batch)
    assert batch.status == ending and len(server.cancelled) == 2
    assert batch.expired_at if ending == "expired" else batch.cancelling_at and batch.cancelled_at
    assert answers(client, batch) == {"a": "answer to a"}
    codes = {row["custom_id"]: row["error"]["code"] for row in rows(client, batch.error_file_id)}
    assert codes == {**dict.fromkeys("bcd", f"batch_{ending}"), None: "invalid_line"}
    assert client.files.delete(batch.input_file_id).deleted
    if ending == "cancelled":
        assert client.batches.cancel(batch.id).status == "cancelled"
    # Its slots are free again.
    assert answers(client, over(client, create(client, *map(line, "efg")))).keys() == set("efg")


def test_small_batches_do_not_wait_for_a_large_one(serve: Serve) -> None:
    server = AnsweringServer(slow=[Hang()])
    client = serve(server, batch_concurrency=2)
    large = create(client, *(line(f"large {number}", "slow" if number == 0 else "") for number in range(300)))
    small = over(client, create(client, *(line(f"small {number}") for number in range(10))))
    assert len(answers(client, small)) == 10
    client.batches.cancel(large.id)
    assert over(client, large).status == "cancelled"


@pytest.mark.parametrize("error", [ConnectionFailed("the line broke"), Unavailable("512 requests are in flight")])
def test_a_server_that_is_away_or_busy_costs_no_answer(serve: Serve, error: Exception) -> None:
    server = AnsweringServer(once={"b": [error], "d": [error], PROBE: [error]})
    client = serve(server)
    batch = over(client, create(client, *map(line, "abcde")))
    assert answers(client, batch) == {name: f"answer to {name}" for name in "abcde"} and batch.error_file_id is None


def test_deleted_and_unfinished_files_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Database(tmp_path)) as database:
        room = jobs.Files(database)
        kept, cut, gone = (room.begin("in.jsonl", jobs.UPLOADED) for _ in range(3))
        for key in (kept, cut, gone):
            room.append(key, [(1, b"x\n"), (2, b"y")])
        name = room.finish(kept)["id"]
        room.delete(room.finish(gone)["id"])
        while room.sweep():
            pass
        assert {row["file"] for row in database.all("SELECT file FROM lines")} == {kept, cut}
        monkeypatch.setattr(jobs, "STALE_S", -1)
        while room.sweep():
            pass
        with pytest.raises(ApiError, match="stood still"):  # it went on after all, and would lack its beginning
            room.append(cut, [(3, b"z")])
        assert [tuple(row) for row in database.all("SELECT file, line FROM lines")] == [(kept, b"x\n"), (kept, b"y")]
        assert [file["id"] for file in room.page(None, None, 10, True)] == [name]


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database, database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(OSError, match="is of version 7; this gateway knows version 1"):
        Database(tmp_path)
    (tmp_path / "batches.sqlite").write_bytes(b"something else, and long enough to be looked at" * 99)
    with pytest.raises(OSError, match="cannot be used: file is not a database"):
        Database(tmp_path)


def test_without_a_folder_the_option_is_named() -> None:
    door = Asked(AnsweringServer(), Settings())
    for method, path in [("GET", "batches"), ("POST", "batches"), ("POST", "files"), ("GET", "files/x/content")]:
        answer = door(method, f"/v1/{path}")
        assert answer.status_code == 501 and "--batch-folder" in answer.json()["error"]["message"]


PROGRAM = """
import json, os, signal, sys, threading
from clients.fake_transport import FakeTransport, final
from tessera_client import client
from tessera_client.transports import Sent
from tessera_gateway.batches import service
from tessera_gateway.batches.jobs import Jobs
from tessera_gateway.cli import gateway_main

folder, kill_at = os.environ["FOLDER"], int(os.environ["KILL_AT"])
log = os.open(folder + "/asked", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Killing(FakeTransport):
    "Answers out of order, by threads; its process dies at the request of that number."
    def send(self, request, request_id, timeout, deliver):
        text = json.loads(request.messages)[-1]["content"][0]["text"]
        with self._lock:
            self.requests.append(text)
            os.write(log, f"{text}\\n".encode())
            if len(self.requests) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        def answer():
            deliver(final(f"answer to {text}"))
            deliver(None)
        threading.Timer(len(self.requests) % 3 * 0.002, answer).start()
        return Sent(lambda: None, lambda: None)

class Half(Jobs):
    "Its process dies when some of the lines have been checked."
    def check(self, key):
        return super().check(key) and os.kill(os.getpid(), signal.SIGKILL)

client.open_transport = lambda url, models: Killing()
if kill_at < 0:
    service.Jobs = Half
sys.exit(gateway_main([*sys.argv[1:], "--workers", "1", "--batch-folder", folder, "--batch-concurrency", "8"]))
"""


def test_no_id_is_lost_or_answered_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(kill_at: int) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
        monkeypatch.setenv("KILL_AT", str(kill_at))
        return started(program=("-c", PROGRAM))

    monkeypatch.setenv("FOLDER", str(tmp_path))
    names = [f"r{number}" for number in range(300)]
    lines = [line(name) for name in names]
    lines[150] = "nonsense"
    # Of two on a folder the second goes on where the first is killed, within the checks; and a new one where both are.
    with killed(-1) as (first, address), killed(80) as (second, _), client_of(address) as client:
        batch = create(client, *lines)
        assert first.wait(60) == second.wait(60) == -signal.SIGKILL
    with killed(0) as (_, address), client_of(address) as client:
        batch = over(client, client.batches.retrieve(batch.id))
        found, failed = answers(client, batch), rows(client, batch.error_file_id)
    assert found == {name: f"answer to {name}" for name in names if name != "r150"}
    assert list(found) == [name for name in names if name in found]  # in the order of the lines
    assert [row["error"]["message"][:8] for row in failed] == ["line 151"]
    counts = batch.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (300, 299, 1)
    # What was over before a kill is not asked again: twice only what was under way.
    asked = Counter((tmp_path / "asked").read_text().split())
    assert sum(asked.values()) - 299 <= 2 * 8 and set(asked) == set(found)
