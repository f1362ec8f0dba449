"""The client against a real tritonserver with toy models of the same contract: what a fake cannot prove."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_model

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import (
    Answer,
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Models,
    Retry,
    ServerError,
    Unavailable,
)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for name in ("vlm", "vlm_unary", "language_model"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(toy_model.config(name))
        (version / "model.py").write_text(Path(toy_model.__file__).read_text())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    log = repository / "server.log"
    with Server(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0, log_path=log)) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def url(server: Server, request: pytest.FixtureRequest) -> str:
    return server.grpc_url if request.param == "grpc" else server.http_url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, retry=Retry(attempts=1), timeout=20) as client:
        yield client


def seen(answer: Answer) -> dict:
    """What the toy says has arrived."""
    return json.loads(answer.text[answer.text.index("{") :])


def cancelled(repository: Path) -> list[str]:
    notes = repository / "cancelled.txt"
    return notes.read_text().split() if notes.exists() else []


def test_all_inputs_arrive_and_all_outputs_come_back(client: Client) -> None:
    assert client.ready() and client.status().version
    answer = client.ask([b"one", b"three"], "hé llo", max_tokens=3, max_tiles=2)
    assert answer.text.startswith("hé llo {") and answer.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.image_tokens) == (7, 3)
    assert answer.timings.decode == 5
    about = seen(answer)
    assert about["sizes"] == [3, 5] and about["id"] == answer.request_id
    assert about["sampling"] == {"max_tokens": 3, "tile_policy": {"max_tiles": 2}}
    assert 19e6 < about["timeout"] <= 20e6


def test_streams(client: Client) -> None:
    with client.stream(b"jpeg", "a b c") as stream:
        assert [delta.text for delta in stream][:3] == ["a ", "b ", "c "]
        assert stream.answer().usage.completion_tokens == 4
        as_sent = [8] if client.url.startswith("http") else [4]  # a generate endpoint takes base64
        assert seen(stream.answer())["sizes"] == as_sent


def test_errors_by_their_kind(client: Client) -> None:
    for call in (client.ask, lambda *a: client.stream(*a).answer()):
        with pytest.raises(InvalidRequest, match="^no picture"):
            call(None, "fail INVALID_ARG no picture")
        with pytest.raises(Unavailable, match="^512 requests"):
            call(None, "fail UNAVAILABLE UNAVAILABLE: 512 requests")
        with pytest.raises(ServerError, match="^it broke"):
            call(None, "fail INTERNAL INTERNAL: it broke")
        with pytest.raises(DeadlineExceeded, match="after 50 ms"):
            call(None, "fail UNAVAILABLE deadline exceeded after 50 ms")


def test_an_unknown_model(url: str) -> None:
    models = Models(vlm="nope", unary="nope")
    with Client(url, models=models) as client, pytest.raises(InvalidRequest, match="unknown model"):
        client.ask(None, "q")


def test_leaving_early_and_deadlines_reach_the_language_model(client: Client, repository: Path) -> None:
    before = len(cancelled(repository))
    with client.stream(None, "slow a b c") as stream:
        next(stream)
    assert len(cancelled(repository)) == before + 1
    with pytest.raises(DeadlineExceeded):
        client.ask(None, "slow a b c", timeout=0.05)
    assert len(cancelled(repository)) == before + 2
    with client.stream(None, "slow a b c d e f") as stream:
        closer = threading.Timer(0.15, stream.close)
        closer.start()
        with pytest.raises(Cancelled):
            stream.answer()
        closer.join()
    assert len(cancelled(repository)) == before + 3
    assert client.ask(None, "still here").text.startswith("still here")


def test_many_at_once_with_failures_among_them(client: Client) -> None:
    questions = [f"fail INVALID_ARG wrong {i}" if i % 7 == 3 else f"q{i}" for i in range(300)]
    results = list(client.ask_many(((b"jpeg", q) for q in questions), concurrency=16, errors="return"))
    for question, result in zip(questions, results, strict=True):
        if question.startswith("fail"):
            assert isinstance(result, InvalidRequest) and question.endswith(result.message)
        else:
            assert result.text.startswith(f"{question} ")


def test_asyncio_twin(url: str, repository: Path) -> None:
    async def run() -> None:
        async with AsyncClient(url, retry=Retry(attempts=1)) as client:
            before = len(cancelled(repository))
            assert await client.ready()
            async with client.stream(b"jpeg", "a b") as stream:
                assert [delta.text async for delta in stream][:2] == ["a ", "b "]
            async with client.stream(None, "slow a b c") as stream:
                await stream.__anext__()
            assert len(cancelled(repository)) == before + 1
            items = [(b"jpeg", f"q{i}") for i in range(60)]
            texts = [answer.text async for answer in client.ask_many(items, concurrency=8)]
            assert [text.split()[0] for text in texts] == [question for _, question in items]

    asyncio.run(run())


def test_an_idle_client_does_not_hold_the_server_back(server: Server) -> None:
    """The last of the module's tests: its server ends here."""
    with Client(server.grpc_url) as client:
        client.ask(None, "q")
        time.sleep(1.3)  # the line closes itself after a second
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 4.5  # at its exit timeout, 5 s, it would have been killed
