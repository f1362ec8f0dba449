"""Two real servers: one asks the other's vision stage (vision_url). Answers, refusals, deadlines, restarts."""

import base64
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import http_door
import pytest
from toy_servers import REPOSITORY

import scene
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import Client, Retry, Unavailable

pytestmark = pytest.mark.server

QUESTION = "Is there an exposed wire?"


def options(log: Path, settings: dict[str, str], *only: str) -> ServerOptions:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return ServerOptions(REPOSITORY, **ports, log_path=log, settings=settings, only=only, exit_timeout_s=1)


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a vision stage and nothing else."""
    log = tmp_path_factory.mktemp("remote") / "eyes.log"
    with Server(options(log, {"vision_encoder.cache_bytes": "0"}, "vision_encoder")) as running:
        yield running


@pytest.fixture(scope="module")
def brain(eyes: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A whole server whose vision stage asks the other's."""
    log = tmp_path_factory.mktemp("local") / "brain.log"
    with Server(options(log, {"vision_encoder.vision_url": eyes.grpc_url})) as running:
        yield running


@pytest.fixture(scope="module")
def client(brain: Server) -> Iterator[Client]:
    with Client(brain.grpc_url, retry=Retry(attempts=1), timeout=60) as client:
        yield client


def test_answers_are_those_of_a_local_stage_word_for_word(server: Server, eyes: Server, client: Client) -> None:
    pictures = [scene.encode_jpeg(scene.sample(number, "heldout")) for number in (7, 8)]
    jobs = [(picture, question) for picture in pictures for question in (QUESTION, "Describe the room.")]
    with Client(server.grpc_url) as local:
        expected = [local.ask(*job, max_tokens=12, logprobs=1) for job in jobs]
    asked = 'nv_inference_request_success{model="vision_encoder",version="1"}'
    before = http_door.read(eyes.metrics_url)[asked]  # its warm-up
    answers = list(client.ask_many(jobs, concurrency=4, max_tokens=12, logprobs=1))
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert all(answer.timings.vision > 0 for answer in answers)
    assert client.ask(None, "Hello?", max_tokens=2).usage.image_tokens == 0
    page = http_door.read(eyes.metrics_url)
    assert page[asked] - before == 4
    assert any(name.startswith("tessera_vision_row_bytes") for name in page)


def test_a_silent_server_costs_no_more_than_the_deadline(eyes: Server, brain: Server, client: Client) -> None:
    picture = scene.encode_jpeg(scene.sample(9, "heldout"))
    texts = {"text_input": QUESTION, "image": base64.b64encode(picture).decode()}
    inputs = [{"name": n, "datatype": "BYTES", "shape": [1], "data": [text]} for n, text in texts.items()]
    os.kill(eyes.pid, signal.SIGSTOP)
    try:
        body = {"inputs": inputs, "parameters": {"timeout": 1_000_000}}
        status, words = http_door.post(f"{brain.http_url}/v2/models/vlm_unary/infer", body)
    finally:
        os.kill(eyes.pid, signal.SIGCONT)
    assert status == 503 and "UNAVAILABLE: deadline exceeded after 1" in words
    assert client.ask(picture, QUESTION, max_tokens=8).finish_reason == "stop"


def test_a_killed_server_is_named_and_found_again(eyes: Server, brain: Server, client: Client) -> None:
    picture = scene.encode_jpeg(scene.sample(10, "heldout"))
    eyes.kill()
    with pytest.raises(Unavailable, match=eyes.grpc_url):
        client.ask(picture, QUESTION, max_tokens=4)
    assert client.ask(None, "Hello?", max_tokens=2).text  # a prompt alone needs no eyes
    assert brain.failure() is None
    eyes.start()
    deadline = time.monotonic() + 20
    while True:
        try:
            answer = client.ask(picture, QUESTION, max_tokens=8)
            break
        except Unavailable:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert answer.finish_reason == "stop"
