"""kill -9 of a stage, and of the engine, under load: clients hear of it, the service comes back, jobs lose nothing."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
from toy_servers import REPOSITORY, Launched, command_line, descendants, wait_until

from tessera.settings.stages import VisionSettings
from tessera_client import Answer, Client, Models, Retry, TesseraClientError

pytestmark = [pytest.mark.server, pytest.mark.faults]

# Of preprocess, which has two instances, the second: the other would not show a watch over first ones alone.
KILLED = "preprocess_0_1"
PATIENCE_S = 300.0  # only so that a test that hangs ends: how long it takes is the machine's affair, and printed


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """`tessera serve` as users start it."""
    log = tmp_path_factory.mktemp("supervised") / "log"
    with Launched(REPOSITORY, log, "--set", "preprocess.instances=3") as running:
        assert running.ready_line.startswith("tessera: ready in "), running.errors()
        yield running


def picture(number: int) -> bytes:
    """A small JPEG unlike all others."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(pixels, (64, 48)))[1].tobytes()


def crowd(service: Launched, pool: ThreadPoolExecutor) -> tuple[list[Future[None]], threading.Semaphore]:
    """32 requests in flight, eight on each of four ways in, and a count of the answers' parts.

    None would end by itself, or by its deadline, before the test does: what ends them is that they hear of the death.
    """
    started = threading.Semaphore(0)
    grpc, http = service.url("grpc"), f"http://{service.url('http')}"
    options: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True, "max_tiles": 1}

    def stream(client: Client, number: int) -> None:
        with client.stream(picture(number), "Describe.", **options) as answer:
            for _ in answer:
                started.release()

    def ask(client: Client, number: int) -> None:
        client.ask(picture(number), "Describe.", **options)

    ways = (
        (grpc, Models(), stream),
        (grpc, Models(vlm="vlm_stream"), stream),
        (http, Models(), stream),
        (http, Models(), ask),
    )
    clients = [
        (Client(url, retry=Retry(attempts=1), timeout=3 * PATIENCE_S, models=models), way) for url, models, way in ways
    ]
    return [pool.submit(way, client, number) for client, way in clients for number in range(8)], started


def test_a_killed_stage_is_heard_of_and_comes_back(service: Launched) -> None:
    assert wait_until(lambda: all(each["last_ping_ms"] for each in service.health()["stages"].values()), PATIENCE_S)
    before = service.health()
    assert before["state"] == "ready" and len(before["stages"]) == 8
    kinds = {stage: words.partition(",")[0] for stage, words in before["weights"].items()}
    assert kinds == {
        "language_model": "float32",
        "vision_encoder": VisionSettings(dtype="auto").in_dtype(tiles=True).dtype,
    }
    with ThreadPoolExecutor(32) as pool:
        asked, started = crowd(service, pool)
        for _ in range(24):
            assert started.acquire(timeout=PATIENCE_S)
        os.kill(before["stages"][KILLED]["pid"], signal.SIGKILL)
        killed = time.monotonic()
        # Without a front the ensemble answers on until the supervisor ends the server; what counts comes after that.
        assert wait_until(lambda: service.health()["state"] != "ready", PATIENCE_S)
        with Client(service.url("grpc"), retry=Retry(attempts=10_000, max_delay=0.2), timeout=PATIENCE_S) as client:
            assert client.ask(picture(99), "Back?", max_tokens=1, max_tiles=1).finish_reason
        assert wait_until(lambda: service.health()["state"] == "ready", PATIENCE_S)  # the metrics service starts last
        back = time.monotonic() - killed
        assert all(isinstance(each.exception(PATIENCE_S), TesseraClientError) for each in asked)
    after = service.health()
    assert after["restarts"] == before["restarts"] + 1
    # A stage that dies inside a metric call takes tritonserver along (abort), which is then what is seen first.
    assert KILLED in after["reason"] or "ended: killed by signal" in after["reason"]
    assert after["grpc"] == before["grpc"] and after["http"] == before["http"]
    assert before["stages"][KILLED]["pid"] != after["stages"][KILLED]["pid"]
    print(f"back after {back:.1f} s")


def test_batch_jobs_outlive_a_kill(service: Launched) -> None:
    """Each answer repeats its question, so that a lost, doubled or exchanged answer shows."""
    before = service.health()
    killed = threading.Event()
    # The engine is a process of the language model's, which it takes along.
    (engine,) = [p for p in descendants(service.process.pid) if "tessera.engine.process.main" in command_line(p)]

    def kill_in_the_middle(done: int) -> None:
        if done >= 30 and not killed.is_set():
            killed.set()
            os.kill(engine, signal.SIGKILL)

    def job(url: str) -> list[Answer]:
        items = [(picture(i), question) for i, question in enumerate(questions)]
        options = {"max_tokens": 2, "max_tiles": 1, "ignore_eos": True, "exclude_input_in_output": False}
        with Client(url) as client:
            return list(client.ask_many(items, concurrency=16, progress=kill_in_the_middle, **options))

    questions = [f"Question {i}?" for i in range(80)]
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(job, (service.url("grpc"), f"http://{service.url('http')}")))
    after = service.health()
    assert killed.is_set() and after["restarts"] == before["restarts"] + 1
    assert "language_model_0_0" in after["reason"] or "ended: killed by signal" in after["reason"]
    for answers in jobs:
        assert [answer.text[: answer.text.index("?") + 1] for answer in answers] == questions
        assert all(answer.usage.completion_tokens == 2 for answer in answers)
        assert any(answer.attempts > 1 for answer in answers)
