"""What an earlier version left half done is gone on with, its results untouched.

``earlier/`` holds what be1e76c wrote: ``batch.jsonl`` of the rows below but for the last, ``parse/`` of the first of
two pages, and the gateway's database (as SQL) of a batch whose last two lines have no result yet.
"""

import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import openai
import pytest
from clients.fake_transport import FakeTransport
from documents.document_reader import DocumentReader, write_pdf
from fakes.answering_server import AnsweringServer
from gateway.gateway_doubles import Asked, answers, listening, over, rows

from tessera_client import client
from tessera_command.cli import main
from tessera_documents import vlm_client
from tessera_gateway.settings import Settings

EARLIER = Path(__file__).parent / "earlier"
ROWS = (
    {"id": "one", "image": "a.jpg"},
    {"id": "two", "image": ["b.jpg"], "options": {"max_tokens": 9}},
    {"id": "bad", "image": None, "question": "bad"},
    {"id": "again", "image": "a.jpg"},
    {"id": "left", "image": "b.jpg"},
)


def use(monkeypatch: pytest.MonkeyPatch, server: FakeTransport) -> None:
    for module in (client, vlm_client):
        monkeypatch.setattr(module, "open_transport", lambda url, models: server)


def test_results_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(f"picture {name}".encode())
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copy(EARLIER / "batch.jsonl", out)
    command = ["batch", str(source), "-o", str(out), "--prompt", "A crack?"]
    server = AnsweringServer()
    use(monkeypatch, server)
    assert main(command) == 1 and server.asked == ["A crack?"]  # one of the results has an error
    before, now = ([json.loads(line) for line in path.open()] for path in (EARLIER / "batch.jsonl", out))
    # The pictures' files are others, with the same bytes: what is known of them is brought up to date, nothing else.
    assert [row | {"stat": ""} for row in now[:4]] == [row | {"stat": ""} for row in before]
    assert [row["id"] for row in now[4:]] == ["left"]
    # Other bytes are noticed, and a row that failed may be asked again.
    (tmp_path / "a.jpg").write_bytes(b"another a")
    assert main(command) == 2
    assert main([*command, "--force", "--again"]) == 0
    assert sorted(server.asked) == ["A crack?", "A crack?", "bad"]  # "again" takes the answer of "one"


def test_a_folder_of_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", [("red", "green", "blue"), ("black", "red", "green")])
    folder = tmp_path / "out" / "a.pdf"
    shutil.copytree(EARLIER / "parse", folder)
    reader = DocumentReader()
    use(monkeypatch, reader)
    assert main(["parse", "-o", str(tmp_path / "out"), str(tmp_path / "a.pdf"), "--dpi", "20"]) == 0
    assert reader.pages_asked == 1
    for path in EARLIER.glob("parse/page-*"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert "<!-- page 2 -->" in (folder / "document.md").read_text()


def test_a_database_of_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database:
        database.executescript((EARLIER / "batches.sql").read_text())
        database.execute("UPDATE batches SET expires_at = ?", [int(time.time()) + 3600])
        database.commit()
        name = database.execute("SELECT id FROM batches").fetchone()[0]
    server = AnsweringServer()
    app = Asked(server, Settings(batch_folder=tmp_path)).app
    with listening(app) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as asking:
        batch = over(asking, asking.batches.retrieve(name))
        assert batch.status == "completed" and batch.metadata == {"room": "7"}
        assert sorted(server.asked) == ["c", "d"]
        assert answers(asking, batch) == {each: f"answer to {each}" for each in "acd"}
        assert [row["custom_id"] for row in rows(asking, batch.error_file_id)] == ["b", None]
        assert asking.files.retrieve(batch.input_file_id).filename == "in.jsonl"
