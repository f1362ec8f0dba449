"""`tessera batch` where what an answer depends on is no longer what it was: the model, pictures, the output itself."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from clients.fake_transport import FakeTransport, final
from fakes.answering_server import PROBE, AnsweringServer
from jobs import batch_runs
from jobs.batch_runs import Capture, questions
from pyarrow import parquet

from tessera_client import ConnectionFailed, ServedModel
from tessera_client.messages import Request
from tessera_client.transports.pool import PooledTransport

OTHER = ServedModel("f" * 32, "internvl")


@pytest.fixture
def batch(batch: Any) -> Any:
    """With a question for all."""
    return lambda server, *arguments: batch(server, *arguments, "--prompt", "A crack?")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jpg").write_bytes(f"picture {name}".encode())
    return folder


def results(path: Path) -> dict[Any, dict[str, Any]]:
    return {row["id"]: row for row in batch_runs.results(path)}


def pictures(server: AnsweringServer) -> list[bytes]:
    return sorted(request.images[0] for request, *_ in server.requests if request.text != PROBE)


def test_another_model_is_refused_and_force_asks_it(batch: Any, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.jsonl"
    assert batch(AnsweringServer(), photos) == 0
    first = out.read_bytes()
    assert {row["checkpoint"] for row in results(out).values()} == {"0" * 16}
    (photos / "d.jpg").write_bytes(b"picture d")
    server = AnsweringServer()
    server.model = OTHER
    assert batch(server, photos) == 2 and server.asked == [] and out.read_bytes() == first
    said = capsys.readouterr().err
    assert "3 of its rows were asked of another model than internvl, checkpoint ffffffff" in said and "--force" in said
    assert batch(server, photos, "--force") == 0 and len(pictures(server)) == 4
    assert {row["checkpoint"] for row in results(out).values()} == {"f" * 16} and len(results(out)) == 4
    # It is so, too, where no row is left to ask; and then a server that is away is no reason to fail.
    assert batch(AnsweringServer(), photos) == 2
    away = AnsweringServer()
    away.model = ConnectionFailed("nobody listens")
    assert batch(away, photos) == 0 and away.requests == []
    pool = PooledTransport({"a:1": AnsweringServer(), "b:1": server})  # type: ignore[dict-item]
    assert batch(pool, photos, "--force") == 2 and "b:1 serves another model" in capsys.readouterr().err
    # Of results of an earlier version, which do not say it, this is said alone.
    old = [{k: v for k, v in row.items() if k not in ("stat", "checkpoint")} for row in results(out).values()]
    out.write_text("".join(json.dumps(row) + "\n" for row in old[:3]))
    last = AnsweringServer()
    assert batch(last, photos) == 0 and len(last.asked) == 1
    assert "3 rows of" in (said := capsys.readouterr().err) and "they are kept; --force asks them again" in said
    assert batch(last, photos, "--force") == 0 and len(last.asked) == 4


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("new", [b"PICTURE b", b"a longer picture"])
def test_other_bytes_of_a_picture_are_refused_and_force_asks_them(
    batch: Any, photos: Path, tmp_path: Path, capsys: Capture, new: bytes, out: str
) -> None:
    assert batch(AnsweringServer(), photos, "-o", tmp_path / out) == 0
    times = os.stat(photos / "b.jpg")
    (photos / "b.jpg").write_bytes(new)
    os.utime(photos / "b.jpg", ns=(times.st_atime_ns, times.st_mtime_ns))  # as some programs set it back
    server = AnsweringServer()
    assert batch(server, photos, "-o", tmp_path / out) == 2 and server.asked == []
    assert "the pictures of 1 of its rows have changed since, the first 'b.jpg'" in capsys.readouterr().err
    assert batch(server, photos, "-o", tmp_path / out, "--force") == 0 and pictures(server) == [new]
    last = AnsweringServer()
    assert batch(last, photos, "-o", tmp_path / out) == 0 and last.asked == []


def test_a_file_that_was_only_touched_is_the_same_picture(batch: Any, photos: Path, tmp_path: Path) -> None:
    assert batch(AnsweringServer(), photos) == 0
    before = results(tmp_path / "out.jsonl")
    for path in photos.iterdir():
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    server = AnsweringServer()
    assert batch(server, photos) == 0 and server.asked == []
    after = results(tmp_path / "out.jsonl")
    assert all(after[name]["stat"] != before[name]["stat"] for name in before)  # so that they are not read each time
    assert [{**after[name], "stat": ""} for name in before] == [{**before[name], "stat": ""} for name in before]


def test_pictures_inside_a_table_are_compared(batch: Any, tmp_path: Path) -> None:
    def write(*contents: bytes) -> Path:
        parquet.write_table(
            arrow.table({"id": ["a", "b"], "image": list(contents)}),
            tmp_path / "t.parquet",
            compression="none",
            use_dictionary=False,
            write_statistics=False,
        )
        return tmp_path / "t.parquet"

    assert batch(AnsweringServer(), write(b"one", b"two")) == 0
    server = AnsweringServer()
    assert batch(server, write(b"one", b"six")) == 2 and server.asked == []
    assert batch(server, write(b"one", b"six"), "--force") == 0 and pictures(server) == [b"six"]


def test_a_server_that_comes_back_with_another_model_ends_the_job(batch: Any, tmp_path: Path, capsys: Capture) -> None:
    class Changing(AnsweringServer):
        """Dies under the fourth question and starts again with another model."""

        def answer_to(self, request: Request) -> Sequence[Any]:
            if len(self.asked) == 4 and self.model != OTHER:
                self.model = OTHER
                return [ConnectionFailed("gone")]
            return super().answer_to(request)

    rows = questions(tmp_path, *(f"q{n}" for n in range(9)))
    server = PooledTransport({"a:1": Changing()})  # type: ignore[dict-item]
    assert batch(server, rows, "--concurrency", "1") == 2
    assert "a:1 serves another model (internvl, checkpoint ffffffff) than this job" in capsys.readouterr().err
    assert sorted(results(tmp_path / "out.jsonl")) == ["q0", "q1", "q2"]


@pytest.mark.parametrize("what", ["removed", "cut", "replaced", "written"])
def test_an_output_that_is_not_what_was_written_ends_the_job(
    batch: Any, tmp_path: Path, capsys: Capture, what: str
) -> None:
    out = tmp_path / "out.jsonl"

    class Meddling(FakeTransport):
        def answer_to(self, request: Request) -> Sequence[Any]:
            if request.text == "q5":
                if what in ("removed", "replaced"):
                    out.unlink()
                if what == "replaced":
                    out.write_text("")
                if what == "cut":
                    os.truncate(out, 100)
                if what == "written":
                    out.write_bytes(out.read_bytes() + b"{}\n")
            return [final("yes")]

    rows = questions(tmp_path, *(f"q{n}" for n in range(9)))
    assert batch(Meddling(), rows, "--concurrency", "1") == 1
    assert "out.jsonl" in (said := capsys.readouterr().err) and "while this run was writing it" in said
