"""A job of Ray Data from parquet to parquet, on a local Ray with two workers that ask: what kills and refusals cost."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet
from standin_server import Service, serve

from tessera_client.ray import Ask

pytestmark = pytest.mark.clients
pytest.importorskip("ray", reason="Ray is not installed here (requirements-clients.txt)")

ROWS, BATCH, WORKERS = 300, 10, 2


class Echo(Service):
    """Answers with the question, and knows who asked; with ``kills``, it kills one of two workers on the way."""

    def __init__(self, kills: bool = False) -> None:
        self.lock = threading.Condition()
        self.asked: list[str] = []
        self.peers: set[str] = set()
        self.kills = kills

    def answer(self, question: str, request_id: str, peer: str) -> str:
        with self.lock:
            self.asked.append(question)
            self.peers.add(peer)
            self.lock.notify_all()
            if self.kills:
                assert self.lock.wait_for(lambda: len(self.peers) == WORKERS, timeout=100)
            if self.kills and len(self.asked) > ROWS // 4:
                self.kills = False
                psutil.Process(process_of(peer)).kill()
        return f"answer to {question}"


class Refusing(Echo):
    """Has no room for ``question`` until it comes in a second request: the SDK's own attempts are one."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question, self.requests = question, set[str]()

    def answer(self, question: str, request_id: str, peer: str) -> str:
        if question == self.question:
            self.requests.add(request_id.rpartition("-")[0])
            if len(self.requests) < 2:
                raise RuntimeError("UNAVAILABLE: exceeds maximum queue size")
        return super().answer(question, request_id, peer)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A local Ray, that of the module."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # which would go to Ray's makers
    import ray

    # Workers import the SDK from where this process does.
    paths = os.pathsep.join(str(Path(__file__).resolve().parents[2] / name) for name in ("clients", "python_backends"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.use_datasource_v2 = False  # which starts ten processes to read one small file
    try:
        yield ray
    finally:
        ray.shutdown()


def questions(folder: Path) -> str:
    """A table of pictures and questions; every tenth row has a path to no picture."""
    pictures = ["data:image/png;base64,cG5n" if number % 10 else "/no/such.jpg" for number in range(ROWS)]
    table = pa.table({"id": range(ROWS), "image": pictures, "prompt": [f"q{number}" for number in range(ROWS)]})
    parquet.write_table(table, folder / "questions.parquet")
    return str(folder / "questions.parquet")


def job(ray: Any, url: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of what was written, by their ids."""
    dataset = ray.data.read_parquet(questions(folder), override_num_blocks=ROWS // BATCH)
    dataset.context.retried_map_errors = ["ServerAway"]
    dataset.context.max_map_retries = 3
    dataset.map_batches(
        Ask,
        fn_constructor_args=(url,),
        fn_constructor_kwargs=options,
        batch_format="pyarrow",
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
        num_cpus=0.2,
    ).write_parquet(str(folder / "answers"))
    return sorted(parquet.read_table(folder / "answers").to_pylist(), key=lambda row: row["id"])


def process_of(peer: str) -> int:
    """The process with the other end of a connection: gRPC says "ipv4:127.0.0.1:PORT"."""
    port = int(peer.rpartition(":")[2])
    (pid,) = {each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.pid}
    return pid


def check(rows: list[dict[str, Any]]) -> None:
    """Every row is there once, with its own answer, or with its own error."""
    assert [row["id"] for row in rows] == list(range(ROWS))
    for row in rows:
        good = bool(row["id"] % 10)
        assert row["answer"] == (f"answer to {row['prompt']}" if good else None)
        assert (row["error"] is None) == good and (good or "No such file" in row["error"])


def test_a_worker_that_is_killed_loses_and_doubles_no_row(ray: Any, tmp_path: Path) -> None:
    service = Echo(kills=True)
    server, url = serve(service)
    try:
        check(job(ray, url, tmp_path))
        good = ROWS - ROWS // 10
        assert len(set(service.asked)) == good < len(service.asked)  # what the dead one had under way was asked again
        assert len(service.peers) == WORKERS + 1  # the third is its successor
    finally:
        server.stop(0)


def test_a_batch_that_found_no_server_is_asked_again_by_ray(ray: Any, tmp_path: Path) -> None:
    service = Refusing("q123")
    server, url = serve(service)
    try:
        check(job(ray, url, tmp_path, timeout=1.0))
        assert len(service.requests) == 2 and service.asked.count("q121") == 2
    finally:
        server.stop(0)
