"""The HTTP transport against a web server of one page: statuses, events, and what becomes of connections. Its requests
are proven by a real tritonserver (test_real_server.py)."""

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fakes.web_page import serving

from tessera_client import (
    Client,
    ConnectionFailed,
    InvalidRequest,
    PicturePlan,
    PictureView,
    ProtocolError,
    Retry,
    ServerError,
    Unavailable,
    Usage,
)
from tessera_client.transports.http import LENGTH_HEADER

LAST = {"finish_reason": "stop", "usage": [1, 2, 3], "timings": [0.0] * 6, "logprobs": ""}


def events(*answers: dict[str, Any]) -> bytes:
    """The body of a generate_stream response."""
    return b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in answers)


@pytest.fixture
def page() -> list[Any]:
    """What the server answers: status, body, headers."""
    return [200, b"", {}]


@pytest.fixture
def client(page: list[Any]) -> Iterator[Client]:
    with serving(lambda: tuple(page)) as port, Client(f"http://127.0.0.1:{port}", retry=Retry(attempts=1)) as client:
        yield client


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, InvalidRequest), (503, Unavailable), (501, ProtocolError), (307, ServerError)],  # which is not followed
)
def test_statuses_of_infer(client: Client, page: list[Any], status: int, kind: type[Exception]) -> None:
    page[:] = status, b'{"error": "in ensemble \'vlm\', so it is"}', {"Location": "/"}
    with pytest.raises(kind) as caught:
        client.ask(None, "q")
    assert caught.value.message == "so it is"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "answers", "kind", "words"),
    [
        (400, [{"error": "in ensemble 'vlm', wrong"}], InvalidRequest, "wrong"),
        (400, [{"error": "UNAVAILABLE: full"}], Unavailable, "full"),
        (200, [{"text_output": "a"}, {"error": "INTERNAL: it broke"}], ServerError, "it broke"),
    ],
)
def test_faults_of_a_stream_are_told_by_their_words(
    client: Client, page: list[Any], status: int, answers: Sequence[Any], kind: type[Exception], words: str
) -> None:
    page[:2] = status, events(*answers)
    with client.stream(None, "q") as stream:
        assert [next(stream).text for _ in answers[:-1]] == ["a"][: len(answers) - 1]
        with pytest.raises(kind, match=words):
            next(stream)


def test_a_text_may_hold_what_other_readers_take_for_a_line_end(client: Client, page: list[Any]) -> None:
    page[1] = events({"text_output": "a\u2028b\x85"}, {"text_output": "c"} | LAST)
    with client.stream(None, "q") as stream:
        assert [delta.text for delta in stream] == ["a\u2028b\x85", "c"]
        assert stream.answer().usage == Usage(1, 2, 3)


def test_a_plan_is_read_from_the_end_of_an_infer_response(client: Client, page: list[Any]) -> None:
    view = {"width": 896, "height": 448, "rows": 1, "columns": 2}
    cut = [{"tokens": n, "unit": "tiles", "policies": ["native"], "views": [view]} for n in (512, 256)]
    data = struct.pack("<I", len(text := json.dumps(cut).encode())) + text
    head = json.dumps({"outputs": [{"name": "CUT", "parameters": {"binary_data_size": len(data)}}]}).encode()
    page[1:] = head + data, {LENGTH_HEADER: str(len(head))}
    assert client.plan([b"one", b"two"]) == tuple(
        PicturePlan(tokens, "tiles", ("native",), (PictureView(896, 448, 1, 2),)) for tokens in (512, 256)
    )


def test_nobody_there_and_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(lambda: (200, events({"text_output": "hello"} | LAST))) as port:
        client = Client(f"http://127.0.0.1:{port}", retry=Retry(attempts=1))
        assert client.stream(None, "q").answer().text == "hello"
    with pytest.raises(ConnectionFailed):
        client.ask(None, "q")
    assert not client.ready()
