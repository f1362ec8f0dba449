"""kill -9 of each stage under load: every client hears of it, the service comes back, a batch job loses nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from toy_servers import Launched, all_gone, command_line, descendants, wait_until

from tessera_client import Answer, Client, Models, Retry, TesseraClientError

pytestmark = [pytest.mark.server, pytest.mark.faults]

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
# Of preprocess, which has two instances, the second: the other would not show a watch over first ones alone. The engine
# is a process of the language model's, which it takes along. The vision stage is killed beneath a batch job.
STAGES = ["preprocess_0_1", "engine"]
PATIENCE_S = 300.0  # only so that a test that hangs ends: how long it takes is the machine's affair, and printed
ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """`tessera serve` as users start it; the short window lets it be killed more often than a crash loop may."""
    log = tmp_path_factory.mktemp("supervised") / "log"
    running = Launched(REPOSITORY, log, "--restart-window", "15", "--set", "preprocess.instances=3")
    assert running.ready_line.startswith("tessera: ready in "), running.process.communicate()[1]
    yield running
    left = descendants(running.process.pid)
    running.process.terminate()
    assert running.process.wait(PATIENCE_S) == 0 and wait_until(lambda: all_gone(left))
    running.process.communicate()


def process_of(service: Launched, stage: str) -> int:
    """Its id; there is one engine."""
    if stage != "engine":
        return service.health()["stages"][stage]["pid"]
    (pid,) = [pid for pid in descendants(service.process.pid) if "tessera.engine.process.main" in command_line(pid)]
    return pid


def picture(number: int) -> bytes:
    """A small JPEG unlike all others."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(pixels, (64, 48)))[1].tobytes()


class Crowd:
    """32 requests in flight, each on its own thread, eight on each of four ways in.

    None would end by itself soon, and no client has a deadline: what ends them is that they hear of the death.
    """

    def __init__(self, service: Launched):
        self.clients = {
            "grpc": Client(service.url("grpc"), retry=ONCE, timeout=None),
            "grpc front": Client(service.url("grpc"), retry=ONCE, timeout=None, models=Models(vlm="vlm_stream")),
            "http": Client(f"http://{service.url('http')}", retry=ONCE, timeout=None),
        }
        self.started = threading.Semaphore(0)
        self.ends: dict[str, float] = {}
        self.errors: dict[str, Exception] = {}
        ways = [("grpc", self.stream), ("grpc front", self.stream), ("http", self.stream), ("http", self.ask)]
        self.threads = [
            threading.Thread(
                target=self.run, args=(f"{way} {ask.__name__} {i}", self.clients[way], ask, i), daemon=True
            )
            for way, ask in ways
            for i in range(8)
        ]
        for thread in self.threads:
            thread.start()

    def run(self, name: str, client: Client, ask: Callable[[Client, int], None], number: int) -> None:
        try:
            ask(client, number)
        except TesseraClientError as error:
            self.errors[name] = error
        self.ends[name] = time.monotonic()

    def stream(self, client: Client, number: int) -> None:
        with client.stream(picture(number), "Describe.", max_tokens=7000, ignore_eos=True, max_tiles=1) as stream:
            for _ in stream:
                self.started.release()

    def ask(self, client: Client, number: int) -> None:
        client.ask(picture(number), "Describe.", max_tokens=7000, ignore_eos=True, max_tiles=1)

    def join(self, seconds: float) -> list[str]:
        """Names of the requests still unanswered after ``seconds``."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for client in self.clients.values():
            client.close()
        return [thread.name for thread in self.threads if thread.is_alive()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_is_heard_of_and_comes_back(service: Launched, stage: str) -> None:
    assert wait_until(lambda: all(each["last_ping_ms"] for each in service.health()["stages"].values()), PATIENCE_S)
    before = service.health()
    assert before["state"] == "ready" and len(before["stages"]) == 8
    kinds = {stage: words.partition(",")[0] for stage, words in before["weights"].items()}
    assert kinds == {"language_model": "float32", "vision_encoder": "float32"}
    victim = process_of(service, stage)
    crowd = Crowd(service)
    for _ in range(24):
        assert crowd.started.acquire(timeout=PATIENCE_S)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    # Without a front the ensemble answers on until the supervisor ends the server; what counts comes after that.
    assert wait_until(lambda: service.health()["state"] != "ready", PATIENCE_S)

    with Client(service.url("grpc"), retry=Retry(attempts=10_000, max_delay=0.2), timeout=PATIENCE_S) as client:
        answer = client.ask(picture(99), "Back?", max_tokens=1, max_tiles=1)
    assert wait_until(lambda: service.health()["state"] == "ready", PATIENCE_S)  # the metrics service starts last
    back = time.monotonic() - killed
    assert crowd.join(PATIENCE_S) == []
    slowest = max(crowd.ends.values()) - killed
    assert len(crowd.ends) == 32 and len(crowd.errors) == 32 and answer.finish_reason
    after = service.health()
    assert after["restarts"] == before["restarts"] + 1
    # A stage that dies inside a metric call takes tritonserver along (abort), which is then what is seen first.
    seen = (stage.replace("engine", "language_model_0_0"), "tritonserver ended: killed by signal")
    assert any(each in after["reason"] for each in seen)
    assert after["grpc"] == before["grpc"] and after["http"] == before["http"]
    assert process_of(service, stage) != victim
    print(f"{stage}: last client heard after {slowest:.1f} s, back after {back:.1f} s")


def test_batch_jobs_outlive_a_kill(service: Launched) -> None:
    """Each answer repeats its question, so that a lost, doubled or exchanged answer shows."""
    before = service.health()
    killed = threading.Event()

    def kill_in_the_middle(done: int) -> None:
        if done >= 30 and not killed.is_set():
            killed.set()
            os.kill(before["stages"]["vision_encoder_0_0"]["pid"], signal.SIGKILL)

    def job(url: str) -> list[Answer]:
        items = [(picture(i), question) for i, question in enumerate(questions)]
        options = {"max_tokens": 2, "max_tiles": 1, "ignore_eos": True, "exclude_input_in_output": False}
        with Client(url) as client:
            return list(client.ask_many(items, concurrency=16, progress=kill_in_the_middle, **options))

    questions = [f"Question {i}?" for i in range(80)]
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(job, (service.url("grpc"), f"http://{service.url('http')}")))
    assert killed.is_set() and service.health()["restarts"] == before["restarts"] + 1
    for answers in jobs:
        assert [answer.text[: answer.text.index("?") + 1] for answer in answers] == questions
        assert all(answer.usage.completion_tokens == 2 for answer in answers)
        assert any(answer.attempts > 1 for answer in answers)
