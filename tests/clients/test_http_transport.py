"""The HTTP transport against a small HTTP server in this process that speaks tritonserver's protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tessera_client import (
    Cancelled,
    Client,
    ConnectionFailed,
    InvalidRequest,
    Models,
    PicturePlan,
    PictureView,
    ProtocolError,
    Retry,
    ServerError,
    TesseraClientError,
    Unavailable,
    Usage,
)
from tessera_client.transports.http import LENGTH_HEADER, HttpTransport

ONCE = Retry(attempts=1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # the client was closed in the middle of an answer
            super().handle()

    def do_GET(self) -> None:
        self.reply(200, b'{"version": "9"}' if self.path == "/v2" else b"")

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.connections.add(self.client_address)
        if self.path == "/v2/repository/index":
            self.reply(200, b'[{"name": "vlm", "version": "1", "state": "READY"}]')
        elif self.path == "/v2/models/language_model/generate_stream":
            server.cancelled.append(json.loads(body)["CANCEL"])
            self.reply(200, b"")
        elif self.path == "/v2/models/vlm_unary/infer":
            self.infer(body)
        elif self.path == "/v2/models/preprocess/infer":
            server.seen = json.loads(body[: int(self.headers[LENGTH_HEADER])])
            view = {"width": 896, "height": 448, "rows": 1, "columns": 2}
            cut = [{"tokens": n, "unit": "tiles", "policies": ["native"], "views": [view]} for n in (512, 256)]
            data = struct.pack("<I", len(text := json.dumps(cut).encode())) + text
            head = json.dumps({"outputs": [{"name": "CUT", "parameters": {"binary_data_size": len(data)}}]}).encode()
            self.reply(200, head + data, {LENGTH_HEADER: str(len(head))})
        elif self.path == "/v2/models/vlm/generate_stream":
            self.generate(json.loads(body))
        else:
            self.reply(404, b'{"error": "no such thing"}')

    def infer(self, body: bytes) -> None:
        head = json.loads(body[: (at := int(self.headers[LENGTH_HEADER]))])
        assert head["inputs"][0]["name"] == "text_input"
        text = body[at + 4 : at + head["inputs"][0]["parameters"]["binary_data_size"]].decode()
        if text.startswith("fail"):
            _, status, message = text.split(" ", 2)
            self.reply(int(status), json.dumps({"error": f"in ensemble 'vlm', {message}"}).encode())
            return
        outputs = {
            "text_output": struct.pack("<I", len(text)) + text.encode(),
            "finish_reason": b"\4\0\0\0stop",
        }
        described = [{"name": n, "parameters": {"binary_data_size": len(d)}} for n, d in outputs.items()]
        answer = json.dumps({"outputs": described}).encode()
        self.reply(200, answer + b"".join(outputs.values()), {LENGTH_HEADER: str(len(answer))})

    def generate(self, body: dict[str, Any]) -> None:
        self.server.seen = body  # type: ignore[attr-defined]
        words = body["text_input"].split(" ")
        if words[0] == "fail":
            self.reply(400, b'data: {"error":"in ensemble \'vlm\', %s"}\n\n' % " ".join(words[1:]).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for i, word in enumerate(words):
                event: dict[str, Any] = {"text_output": word, "finish_reason": "", "usage": [0, 0, 0]}
                if word == "hang":
                    time.sleep(0.5)
                if word == "broken":
                    event = {"error": "INTERNAL: it broke"}
                elif i == len(words) - 1:
                    event |= {"finish_reason": "stop", "usage": [1, 2, 3], "timings": [0.0] * 6, "logprobs": ""}
                data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.cancelled, server.connections = [], set()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_plan_is_asked_of_preprocess_alone(server: Any) -> None:
    with Client(server.url) as client:
        assert client.plan([b"one", b"two"]) == tuple(
            PicturePlan(tokens, "tiles", ("native",), (PictureView(896, 448, 1, 2),)) for tokens in (512, 256)
        )
    assert [output["name"] for output in server.seen["outputs"]] == ["CUT"]
    assert [tensor["name"] for tensor in server.seen["inputs"]] == ["text_input", "sampling_parameters", "image"]


def test_connections_are_reused(server: Any) -> None:
    with Client(server.url) as client:
        for i in range(20):
            assert client.ask(None, f"q{i}").text == f"q{i}"
            with client.stream(None, f"a {i}") as stream:
                stream.answer()
        assert len(server.connections) == 1
        answers = list(client.ask_many(((None, f"q{i}") for i in range(40)), concurrency=4))
    assert [a.text for a in answers] == [f"q{i}" for i in range(40)]
    assert len(server.connections) <= 5


@pytest.mark.parametrize("options", [{}, {"max_tokens": 2}], ids=str)
def test_a_stream_tells_its_deadline(server: Any, options: dict[str, Any]) -> None:
    """In sampling_parameters, for the generate endpoints have no other place for it."""
    with Client(server.url, timeout=9) as client, client.stream(None, "a", **options) as stream:
        stream.answer()
    sampling = json.loads(server.seen["sampling_parameters"])
    assert 8e6 < sampling.pop("timeout_us") <= 9e6 and sampling == options
    with Client(server.url, timeout=None) as client, client.stream(None, "a") as stream:
        stream.answer()
    assert "sampling_parameters" not in server.seen


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (404, InvalidRequest), (500, ServerError), (503, Unavailable), (501, ProtocolError)],
)
def test_statuses_of_infer(server: Any, status: int, kind: type[Exception]) -> None:
    with Client(server.url, retry=ONCE) as client:
        with pytest.raises(kind) as caught:
            client.ask(None, f"fail {status} so it is")
        assert caught.value.message == "so it is"  # type: ignore[attr-defined]


def test_faults_of_a_stream_are_told_by_their_words(server: Any) -> None:
    with Client(server.url, retry=ONCE) as client:
        with pytest.raises(InvalidRequest, match="wrong"), client.stream(None, "fail wrong") as stream:
            stream.answer()
        with pytest.raises(Unavailable), client.stream(None, "fail UNAVAILABLE: full") as stream:
            stream.answer()
        with client.stream(None, "a broken b") as stream:
            assert next(stream).text == "a"
            with pytest.raises(ServerError, match="it broke"):
                next(stream)


def test_status_and_nobody_there(server: Any) -> None:
    with Client(server.url) as client:
        assert client.ready() and client.status().version == "9"
    server.shutdown()
    server.server_close()
    with Client(server.url, retry=ONCE) as client:
        with pytest.raises(ConnectionFailed):
            client.ask(None, "q")
        assert not client.ready()


def test_a_text_may_hold_what_other_readers_take_for_a_line_end(server: Any) -> None:
    with Client(server.url) as client, client.stream(b"jpeg", "a\u2028b\x85 c") as stream:
        assert [delta.text for delta in stream] == ["a\u2028b\x85", "c"]
        assert stream.answer().usage == Usage(1, 2, 3)
    assert server.seen["image"] == [base64.b64encode(b"jpeg").decode()] and server.seen["stream"] is True


def test_neither_proxies_of_the_environment_nor_redirects_are_followed(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Client(server.url, retry=ONCE) as client:
        assert client.ask(None, "hello").text == "hello"
        with pytest.raises(ServerError):
            client.ask(None, "fail 307 elsewhere")


def test_nagle_is_off(server: Any) -> None:
    """A request's last packet must not wait for the acknowledgement of the one before."""
    transport = HttpTransport(server.url.removeprefix("http://"), Models())

    with transport._client.stream("GET", "/v2") as response:
        sock = response.extensions["network_stream"].get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    transport.close()


def test_closing_the_client_ends_what_runs(server: Any) -> None:
    client = Client(server.url)
    stream = client.stream(None, "a hang b")
    next(stream)
    client.close()
    client.close()
    assert len(server.cancelled) == 1
    with pytest.raises(Cancelled, match="closed"):
        next(stream)
    with pytest.raises(TesseraClientError, match="closed"):
        client.ask(None, "q")
