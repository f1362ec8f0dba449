"""The client against a real tritonserver with toy models of the same contract: what a fake cannot prove."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import toy_model

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera_client import (
    Answer,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Models,
    Retry,
    ServerError,
    TesseraClientError,
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
    with client.stream(b"jpeg", "a b c", max_tokens=2) as stream:
        assert [delta.text for delta in stream][:3] == ["a ", "b ", "c "]
        assert stream.answer().usage.completion_tokens == 4
    about, over_http = seen(stream.answer()), client.url.startswith("http")
    assert about["sizes"] == [8 if over_http else 4]  # a generate endpoint takes base64
    # ... and has no other place for a deadline.
    assert 19e6 < (about["sampling"].pop("timeout_us") if over_http else about["timeout"]) <= 20e6
    assert about["sampling"] == {"max_tokens": 2}


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


def test_closing_the_client_ends_what_runs(url: str, repository: Path) -> None:
    before = len(cancelled(repository))
    client = Client(url)
    stream = client.stream(None, "slow a b c")
    next(stream)
    client.close()
    client.close()
    assert len(cancelled(repository)) == before + 1
    if url.startswith("http"):  # over gRPC what comes in time is waited for
        with pytest.raises(Cancelled, match="closed"):
            stream.answer()
    with pytest.raises(TesseraClientError, match="closed"):
        client.ask(None, "q")


def test_http_connections_are_reused(server: Server) -> None:
    port = int(server.http_url.rpartition(":")[2])
    with Client(server.http_url) as client:
        for i in range(5):
            assert client.ask(None, f"q{i}").text and client.stream(None, f"a {i}").answer().text
        opened = [each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == port]
        assert [each.status for each in opened] == ["ESTABLISHED"]
