"""A batch folder whose disk is full: what is refused leaves nothing, and what was accepted waits and says so."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from batch_files import answers, client_of, create, line, over
from fakes.answering_server import AnsweringServer
from gateway_doubles import Asked, listening, until

from tessera_gateway.batches import database, routes, runner, service
from tessera_gateway.batches.files import Files
from tessera_gateway.batches.jobs import Jobs
from tessera_gateway.settings import Settings

MIB = 1 << 20
FULL = sqlite3.OperationalError("database or disk is full")
LOCKED = sqlite3.OperationalError("database is locked")
FORM = {"Content-Type": "multipart/form-data; boundary=B"}
HEAD = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    monkeypatch.setattr(service, "AGAIN_S", 0.02)
    monkeypatch.setattr(routes, "DROP_S", 0.02)


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
    lines = [b"x" * 65_535 + b"\n"] * (size // 65_536)
    content = b"".join([HEAD, *lines, b"\r\n--B--\r\n"])
    body: Any = content if declared else iter([HEAD, *lines, b"\r\n--B--\r\n"])
    return httpx.post(f"{address}/v1/files", content=body, headers=FORM, timeout=60, trust_env=False)


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
