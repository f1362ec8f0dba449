"""The gRPC transports against a small gRPC server in this process that speaks tritonserver's protocol."""

import asyncio
import json
import queue
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from standin_server import Service, serve
from tritonclient.grpc import service_pb2 as pb

from tessera_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    PicturePlan,
    PictureView,
    Retry,
    Unavailable,
)
from tessera_client.messages import question_request
from tessera_wire import line
from tessera_wire.connection import Connection

PLAN = PicturePlan(6, "image tokens", (), (PictureView(84, 56, 2, 3),))


def element(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


class Server(Service):
    """Echoes the question word by word; answers out of order, since each request has a thread."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.leases: dict[str, Any] = {}  # what ends them
        self.stops = False
        self.calls = 0
        self.open_calls = 0
        self.metadata: list[Any] = []
        self.parameters: dict[str, Any] = {}
        self.asked: tuple[list[str], dict[str, bytes]] = ([], {})
        self._server, self.address = serve(self)

    def stop(self) -> None:
        self._server.stop(0).wait()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        self.calls += 1
        self.open_calls += 1
        self.metadata.append(context.invocation_metadata())
        out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        context.add_callback(lambda: out.put(None))  # cancelled, or over

        def read() -> None:
            with suppress(Exception), ThreadPoolExecutor(64) as workers:
                for request in requests:
                    workers.submit(self.work, request, out.put)
            out.put(None)

        threading.Thread(target=read).start()
        try:
            yield from iter(out.get, None)
        finally:  # grpc goes on with no generator of a call that was cancelled while it sent
            self.open_calls -= 1

    def ModelInfer(self, request: Any, context: Any) -> Any:
        assert request.model_name == "preprocess"
        inputs = {i.name: raw for i, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        code, words = REFUSED.get(inputs["image"][4:], ("", ""))
        if code:
            context.abort(grpc.StatusCode[code], words)
        time.sleep(2 * (inputs["image"][4:] == b"slow"))
        self.asked = ([output.name for output in request.outputs], inputs)
        return self.response(request, {"CUT": json.dumps([asdict(PLAN)])}, last=True).infer_response

    def work(self, request: Any, put: Any) -> None:
        inputs = {i.name: raw for i, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        control, end = inputs.keys() & {"CANCEL", "LEASE"}, self.response(request, {}, last=True)
        assert request.model_name == "language_model" or not control
        if "CANCEL" in inputs and self.stops:
            put(self.failure(request, "UNAVAILABLE: Server is stopping"))
        elif control:
            (name,) = (inputs[each][4:].decode() for each in control)
            if "LEASE" in inputs:
                self.leases[name] = partial(put, end)
            else:
                self.leases.pop(name, lambda: self.cancelled.append(name))()
                put(end)
        else:
            self.parameters = dict(request.parameters)
            words = inputs["text_input"][4:].decode().split()
            for word, reason in zip(words, [""] * (len(words) - 1) + ["stop"], strict=True):
                time.sleep(int(word) / 1000 if word.isdigit() else 0)
                put(self.response(request, {"text_output": word, "finish_reason": reason}, last=False))
            put(end)

    def failure(self, request: Any, words: str) -> Any:
        message = self.response(request, {}, last=False)
        message.error_message = words
        return message

    def response(self, request: Any, outputs: dict[str, str], last: bool) -> Any:
        message = pb.ModelStreamInferResponse()
        message.infer_response.id = request.id
        message.infer_response.parameters["triton_final_response"].bool_param = last
        for name, value in outputs.items():
            message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
            message.infer_response.raw_output_contents.append(element(value))
        return message


REFUSED = {
    b"not one": ("INVALID_ARGUMENT", "image 0: not a picture"),
    b"one more": ("UNAVAILABLE", "[request id: 7] Exceeds maximum queue size"),
    b"any": ("INTERNAL", "Stub process 'preprocess_0_0' is not healthy."),
    b"gone": ("UNAVAILABLE", "Socket closed"),
}
PLAN_ERRORS = {
    b"not one": InvalidRequest, b"one more": Unavailable, b"any": Unavailable, b"gone": ConnectionFailed,
    b"slow": DeadlineExceeded,
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_requests_share_one_call_and_answers_find_their_way(server: Server) -> None:
    with Client(server.address) as client:
        questions = [f"{(7 * i) % 30} q{i}" for i in range(40)]
        answers = list(client.ask_many(((None, q) for q in questions), concurrency=8))
    assert [answer.text for answer in answers] == [q.replace(" ", "") for q in questions]
    assert server.calls == 1
    assert not any(key == "triton_grpc_error" for key, _ in server.metadata[0])  # it can kill tritonserver


def test_a_plan_is_asked_of_preprocess_alone(server: Server) -> None:
    with Client(server.address, retry=Retry(attempts=1)) as client:
        assert asyncio.run(AsyncClient(server.address).plan(b"jpeg", tile_policy="native")) == (PLAN,)
        assert client.plan(b"jpeg", max_tiles=6) == (PLAN,)
        outputs, inputs = server.asked
        assert outputs == ["CUT"] and set(inputs) == {"text_input", "image", "sampling_parameters"}
        assert json.loads(inputs["sampling_parameters"][4:]) == {"max_tokens": 1, "tile_policy": {"max_tiles": 6}}
        for picture, kind in PLAN_ERRORS.items():
            with pytest.raises(kind):
                client.plan(picture, timeout=0.5)
        server.stop()
        ask = partial(client.ask, None, "q", timeout=10)  # the second is not sent by the call that the first broke
        for call in (client.status, ask, ask, partial(client.plan, b"jpeg")):
            with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1"):
                call()
        assert not client.ready()
    with pytest.raises(Cancelled, match="closed"):
        client.plan(b"jpeg")


def test_a_call_that_fails_at_once_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its reader may be through before the sender goes on."""

    class AtOnce(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()

    monkeypatch.setattr(line, "threading", SimpleNamespace(Thread=AtOnce, Lock=threading.Lock, Event=threading.Event))
    delivered: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = line.Line(Connection("127.0.0.1:9"))
    asked.send("vlm", "1", [], delivered.put)
    assert isinstance(delivered.get(timeout=5), ConnectionFailed)
    asked.close(1)


def no_calls(server: Server) -> bool:
    deadline = time.monotonic() + 10
    while server.open_calls and time.monotonic() < deadline:
        time.sleep(0.01)
    return server.open_calls == 0


def test_a_call_holds_a_lease_that_its_requests_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the server ends them when this process is killed."""
    monkeypatch.setattr(line, "IDLE_SECONDS", 0.05)
    with Client(server.address) as client:
        with client.stream(None, "a 200 b") as stream:
            next(stream)
            (lease,) = server.leases
            assert server.parameters[line.LEASE].string_param.split()[0] == lease
            assert stream.answer().text == "a200b"
        assert no_calls(server) and not server.leases
        with client.stream(None, "a 200 b") as stream:
            next(stream)
            assert len(server.leases) == 1 and lease not in server.leases
    assert no_calls(server) and not server.leases


def test_a_server_that_stops_does_not_wait_for_a_lease(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no request any more that could end it."""
    monkeypatch.setattr(line, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(line, "RELEASE_SECONDS", 600)
    with Client(server.address) as client:
        assert client.ask(None, "one").text == "one"
        server.stops = True
        assert no_calls(server)


@pytest.mark.parametrize(
    ("options", "level"), [({}, 0), ({"priority": -3}, 1), ({"priority": 10}, 3), ({"priority": "soon"}, 0)]
)
def test_a_priority_is_a_level_of_the_servers_own_queues(options: dict[str, Any], level: int) -> None:
    priority = question_request(None, "?", **options).priority
    message = Connection("127.0.0.1:9").infer_message("vlm", "seven", [], priority=priority)
    assert message.parameters["priority"].uint64_param == level
