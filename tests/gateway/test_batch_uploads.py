"""What POST /v1/files takes, piece by piece, and what it refuses; and a batch folder whose disk is full.

There what is refused leaves nothing, and what was accepted waits and says so.
"""

import asyncio
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from clients.fake_transport import FakeTransport
from fakes.answering_server import AnsweringServer
from gateway_doubles import Asked, answers, client_of, create, line, listening, over, until
from hypothesis import given
from hypothesis import strategies as some
from python_multipart.exceptions import FormParserError

from tessera_gateway.batches import database, routes, runner, service
from tessera_gateway.batches.jobs import Files, Jobs
from tessera_gateway.batches.routes import Form
from tessera_gateway.errors import ApiError
from tessera_gateway.settings import Settings

MIB = 1 << 20
FULL = sqlite3.OperationalError("database or disk is full")
LOCKED = sqlite3.OperationalError("database is locked")
FORM = "multipart/form-data; boundary=B"
PURPOSE = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: x/y\r\n\r\nab\nc\r\n'
END = b"--B--\r\n"


@pytest.fixture
def door(tmp_path: Path) -> Asked:
    return Asked(FakeTransport(), Settings(batch_folder=tmp_path, max_body_mib=1, max_file_mib=2))


def send(door: Asked, *parts: bytes, **headers: str) -> httpx.Response:
    return door("POST", "/v1/files", content=b"".join(parts), headers={"Content-Type": FORM, **headers})


def kept(door: Asked) -> int:
    """Lines in the database, after what is gone was swept away."""
    room = door.app.state.batches

    def count() -> int:
        while room.files.sweep():
            pass
        return len(room.database.all("SELECT number FROM lines"))

    return asyncio.run(room.database.call(count))


@pytest.mark.parametrize("parts", [(PURPOSE, FILE), (FILE, PURPOSE), (b"\r\n", FILE, PURPOSE)])
def test_a_file_and_its_purpose_in_any_order(door: Asked, parts: tuple[bytes, ...]) -> None:
    file = send(door, *parts, END, b"an epilogue").json()
    assert (file["filename"], file["bytes"], file["purpose"]) == ("in.jsonl", 4, "batch") and kept(door) == 2
    assert door("GET", f"/v1/files/{file['id']}/content").content == b"ab\nc"


@pytest.mark.parametrize(
    ("parts", "words", "status"),
    [
        ((FILE, END), "purpose must be 'batch'", 400),
        ((FILE, PURPOSE.replace(b"batch", b"fine-tune"), END), "purpose must be 'batch'", 400),
        ((PURPOSE, END), "no field 'file'", 400),
        ((PURPOSE, FILE, FILE, END), "the form has file twice", 400),
        ((PURPOSE, FILE), "ends before its last boundary", 400),
        ((PURPOSE, FILE, PURPOSE.replace(b"purpose", b"expires_after[seconds]"), END), "expires_after", 400),
        ((PURPOSE.replace(b"batch", b"batch" * 999), FILE, END), "purpose is too long", 400),
        ((b"--B\r\n\r\nx\r\n", END), "a field has no name", 400),
        ((b"a preamble\r\n", FILE, PURPOSE, END), "Expected boundary character", 400),
        ((b"--Bx\r\n\r\n", END), "Did not find CR at end of boundary", 400),
        ((b"--B\r\nX: ", b"x" * 8192), "Maximum header size exceeded", 400),
        ((PURPOSE, FILE.replace(b"ab", b"a" * (1 << 20)), END), "line 1 is larger than 1 MiB (--max-body-mib)", 413),
        ((PURPOSE, FILE.replace(b"c", b"c" * (1 << 20) + b"c"), END), "line 2 is larger than 1 MiB", 413),
        ((PURPOSE, FILE.replace(b"ab", b"\n" * 10_000), END), "more than 10,000 lines", 413),
        ((PURPOSE, FILE.replace(b"ab", (b"a" * 1023 + b"\n") * 2048), END), "larger than 2 MiB (--max-file-mib)", 413),
    ],
)
def test_another_form_is_refused_and_nothing_of_it_stays(
    door: Asked, parts: tuple[bytes, ...], words: str, status: int
) -> None:
    response = send(door, *parts)
    assert response.status_code == status and words in response.json()["error"]["message"]
    assert kept(door) == 0 and door("GET", "/v1/files").json()["data"] == []


def test_a_body_that_is_no_form_or_from_another_site(door: Asked) -> None:
    for kind in ("application/json", "multipart/form-data", "nonsense"):
        assert send(door, PURPOSE, FILE, END, **{"Content-Type": kind}).status_code == 415
    assert send(door, **{"Content-Type": "multipart/form-data; boundary*=idna''%ff"}).status_code == 415
    assert send(door, **{"Content-Type": "multipart/form-data; boundary=" + "B" * 999}).status_code == 400
    assert send(door, PURPOSE, FILE, END, Origin="http://elsewhere").status_code == 403
    assert send(door, PURPOSE, FILE, END, Origin="http://gateway").status_code == 200


def test_a_large_file_whose_length_nobody_tells(tmp_path: Path) -> None:
    """By the client's own form, in the pieces that the network makes of it, over many slices of lines."""
    door = Asked(FakeTransport(), Settings(batch_folder=tmp_path, max_file_mib=8, max_body_mib=1, max_bodies_mib=2))
    content = "\n".join(line(f"{number}", "x" * (2 * number)) for number in range(2500)).encode()
    with listening(door.app) as address, client_of(address) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert client.files.content(file.id).content == content and len(content) > 3 << 20
        assert door.app.state.counters.total("body_bytes_held") == 0  # and what is written counted no more before

        def body() -> Any:
            yield PURPOSE + FILE[:-6]
            for _ in range(9):
                yield (b"x" * 1023 + b"\n") * 1024

        refusal = httpx.post(f"{address}/v1/files", content=body(), headers={"Content-Type": FORM}, trust_env=False)
        assert refusal.status_code == 413 and refusal.json()["error"]["code"] == "body_too_large"
        assert [each.id for each in client.files.list()] == [file.id] and kept(door) == 2500


CONTENT = some.binary(max_size=40) | some.text("\r\n-B", max_size=40).map(str.encode)


@given(CONTENT, CONTENT, some.lists(some.integers(1, 20), max_size=99))
def test_a_form_is_the_same_however_it_is_cut(before: bytes, content: bytes, cuts: list[int]) -> None:
    before, content = (b"" if b"\r\n--B" in b"\r\n" + each else each for each in (before, content))
    body = PURPOSE + FILE.replace(b"ab\nc", before + content) + END
    form = Form(FORM, 1)
    while body:
        size = cuts.pop() if cuts else len(body)
        form.feed(body[:size])
        body = body[size:]
    form.check_end()
    lines, size = form.take()
    assert b"".join(line for _, line in lines) == before + content and size == len(before + content)
    assert [number for number, _ in lines] == list(range(1, len(lines) + 1)) and form.filename == "in.jsonl"
    assert [line for _, line in lines] == (before + content).splitlines(keepends=True) or b"\r" in before + content


@given(some.binary(max_size=200))
def test_no_body_does_more_than_be_refused(body: bytes) -> None:
    form = Form(FORM, 1)
    with suppress(ApiError, FormParserError):
        form.feed(FILE[:-6] + body)
        assert form.take()[1] <= len(body)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(service, "AGAIN_S", 0.02)
    monkeypatch.setattr(routes, "DROP_S", 0.02)
    monkeypatch.setattr(routes, "MOST_LINES", 10_000)


def used(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def rows(folder: Path) -> tuple[int, int]:
    """(files, lines) in the database."""
    connection = sqlite3.connect(folder / "batches.sqlite", timeout=30)
    counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("files", "lines")]
    connection.close()
    return counts[0], counts[1]


def sent(address: str, size: int, declared: bool) -> httpx.Response:
    """The answer to an upload of lines of 64 KiB."""
    parts = [PURPOSE, FILE[:-6], *[b"x" * 65_535 + b"\n"] * (size // 65_536), b"\r\n", END]
    body: Any = b"".join(parts) if declared else iter(parts)
    return httpx.post(f"{address}/v1/files", content=body, headers={"Content-Type": FORM}, timeout=60, trust_env=False)


def test_a_refused_upload_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk of 24 MiB."""

    def statvfs(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=(24 * MIB - others - used(folder)) // 4096, f_frsize=4096)

    others = 0
    monkeypatch.setattr(database.os, "statvfs", statvfs)
    monkeypatch.setattr(database, "KEPT_FREE", 4 * MIB)
    with listening(Asked(AnsweringServer(), Settings(batch_folder=tmp_path)).app) as address:
        before = used(tmp_path)
        for declared in (True, False):
            refusal = sent(address, 40 * MIB, declared)
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "storage_full"
            assert "retry-after" in refusal.headers
            until(lambda: rows(tmp_path) == (0, 0) and used(tmp_path) < before + 5 * MIB)
        assert sent(address, 2 * MIB, True).status_code == 200
        assert httpx.get(f"{address}/health", trust_env=False).json() == {"ready": True}
        others = 16 * MIB
        assert "uploads are refused" in httpx.get(f"{address}/health", trust_env=False).json()["batches"]
        assert sent(address, MIB, False).status_code == 503
        until(lambda: rows(tmp_path) == (1, 32))


def test_an_accepted_batch_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite finds no room, as on a full disk, and says so everywhere but to questions of people."""
    server = AnsweringServer()
    door = Asked(server, Settings(batch_folder=tmp_path, batch_concurrency=4))
    batches, counted = door.app.state.batches.database, door.app.state.counters.total
    texts = {f"{number}": f"{number} " + "long " * 4000 for number in range(20)}
    with listening(door.app) as address, client_of(address) as client:

        def limit(pages: int) -> None:
            batches._thread.submit(batches.all, f"PRAGMA max_page_count = {pages}").result()

        real = Jobs.live
        monkeypatch.setattr(Jobs, "live", lambda self: [])
        batch = create(client, *(line(name, text) for name, text in texts.items()))
        limit(1)  # no more than there are
        monkeypatch.setattr(Jobs, "live", real)
        until(lambda: client.batches.retrieve(batch.id).errors is not None)
        for waiting in (client.batches.retrieve(batch.id), *client.batches.list()):
            assert waiting.status in ("validating", "in_progress") and waiting.errors and waiting.errors.data
            assert waiting.errors.data[0].code == "storage_full"
            assert "disk is full" in (waiting.errors.data[0].message or "")
        assert counted("batch_writes_waiting") > 0
        with pytest.raises(openai.InternalServerError, match="cannot be used now: database or disk is full"):
            client.files.create(file=("in.jsonl", b"x" * 3 * MIB), purpose="batch")
        health = httpx.get(f"{address}/health", trust_env=False)
        assert health.status_code == 200 and "batches wait" in health.json()["batches"]
        time.sleep(0.3)  # many tries
        limit(1 << 30)
        batch = over(client, batch)
        assert answers(client, batch) == {name: f"answer to {text}" for name, text in texts.items()}
        assert batch.errors is None and "batches" not in httpx.get(f"{address}/health", trust_env=False).json()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "is full" in said[0] and "there is room again" in said[1]
    assert len(server.asked) == len(texts)  # what was answered waited to be written: nothing was asked twice
    assert counted("batch_writes_waiting") == 0


def test_an_upload_that_cannot_be_removed_at_once_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(*_: Any) -> None:
        raise FULL

    def drop(self: Files, key: int) -> None:
        tries.append(key)
        if len(tries) < 4:
            assert door.app.state.counters.total("batch_writes_waiting") == 0  # no batch waits for it
            raise (FULL, LOCKED)[len(tries) % 2]
        real(self, key)

    tries: list[int] = []
    real = Files.drop
    monkeypatch.setattr(Files, "append", append)
    monkeypatch.setattr(Files, "drop", drop)
    door = Asked(AnsweringServer(), Settings(batch_folder=tmp_path))
    with listening(door.app) as address:
        assert sent(address, 3 * MIB, True).json()["error"]["code"] == "storage_full"
        until(lambda: rows(tmp_path) == (0, 0))
    assert len(tries) == 4
