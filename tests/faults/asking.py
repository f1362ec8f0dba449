"""Requests as raw tensors to a running server, as a careless client would send them; every end of one is an Outcome.
What must not stand in an answer to a bad one."""

from __future__ import annotations

import json
import queue
import re
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

Tensors = Mapping[str, Sequence[bytes]]
HANG_SECONDS = 10.0
STATUS = re.compile(r"\b([A-Z]{3,}(?:_[A-Z]+)*): ")
PREFIX = re.compile(r"^(?:in ensemble '[^']*', *|\[request id: [^\]]*\] *)+")
HTTP_STATUS = {400: "INVALID_ARGUMENT", 503: "UNAVAILABLE"}
LONGEST = 400
ROOT = str(Path(__file__).resolve().parents[2])
LEAKS = ("Traceback", ".py", "\n", "site-packages", "/tmp", "/home", "/root", "/usr", ROOT, sys.prefix)


@dataclass(frozen=True)
class Outcome:
    """``status``: "OK", gRPC's name of the fault, "" where none came with it, or "HANG". ``text``: answer or error."""

    status: str
    text: str
    seconds: float

    @property
    def fine(self) -> bool:
        """Answered, refused as the client's fault, or out of the time that the client set."""
        overdue = self.status == "UNAVAILABLE" and self.text.startswith("deadline exceeded after")
        return self.status in ("OK", "INVALID_ARGUMENT") or overdue


class GrpcAsker:
    """One gRPC stream for one thread; a request that fails leaves it usable."""

    def __init__(self, url: str, model: str = "vlm") -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._model = model
        self._client.start_stream(lambda result, error: self._events.put((result, error)))

    def ask(self, tensors: Tensors) -> Outcome:
        inputs = [bytes_input(name, items) for name, items in tensors.items()]
        return self.send([*inputs, flag_input("exclude_input_in_output", True)])

    def send(self, inputs: list[grpcclient.InferInput]) -> Outcome:
        started, words = time.monotonic(), ""

        def outcome(status: str, text: str) -> Outcome:
            return Outcome(status, text, time.monotonic() - started)

        self._client.async_stream_infer(self._model, inputs)
        while True:
            try:
                result, error = self._events.get(timeout=HANG_SECONDS)
            except queue.Empty:
                return outcome("HANG", f"no answer in {HANG_SECONDS:g} s")
            if error is not None:
                return outcome(*status_and_words(error.message()))
            words += result.as_numpy("text_output")[0].decode()
            if result.as_numpy("finish_reason")[0]:
                return outcome("OK", words)

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


class HttpAsker:
    """``vlm_unary`` over HTTP infer, tensors as raw bytes."""

    def __init__(self, url: str, model: str = "vlm_unary") -> None:
        self._url = f"{url}/v2/models/{model}"

    def ask(self, tensors: Tensors) -> Outcome:
        data = {name: b"".join(struct.pack("<I", len(i)) + i for i in items) for name, items in tensors.items()}
        inputs: list[dict[str, Any]] = [
            {"name": n, "datatype": "BYTES", "shape": [len(i)], "parameters": {"binary_data_size": len(data[n])}}
            for n, i in tensors.items()
        ]
        inputs.append({"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]})
        head = json.dumps({"inputs": inputs}).encode()
        body = head + b"".join(data.values())
        return self.post("infer", body, {"Inference-Header-Content-Length": str(len(head))})

    def post(self, way: str, body: bytes, headers: Mapping[str, str] = {}) -> Outcome:
        """``way``: infer, generate or generate_stream."""
        request = urllib.request.Request(f"{self._url}/{way}", body, {"Content-Type": "application/json", **headers})
        started = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=HANG_SECONDS) as response:
                text = response.read().decode()
            return Outcome("OK", text_output(text) if way == "infer" else text, time.monotonic() - started)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            status, words = status_and_words(error_words(text))
            return Outcome(status or HTTP_STATUS.get(error.code, "INTERNAL"), words, time.monotonic() - started)
        except TimeoutError:
            return Outcome("HANG", f"no answer in {HANG_SECONDS:g} s", time.monotonic() - started)

    def close(self) -> None:
        pass


class Crowd:
    """Threads that ask good requests over and over, to see whether their answers stay what they were.

    Closes the askers, one for each thread, at its end.
    """

    def __init__(self, askers: Sequence[GrpcAsker | HttpAsker], requests: Sequence[Tensors]) -> None:
        self.asked = 0
        self.changed: list[str] = []
        self._askers, self._requests = askers, requests
        self._expected = [askers[0].ask(request) for request in requests]
        assert all(outcome.status == "OK" for outcome in self._expected), self._expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(asker,)) for asker in askers]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for asker in self._askers:
            asker.close()

    def _run(self, asker: GrpcAsker | HttpAsker) -> None:
        while not self._stop.is_set():
            for request, expected in zip(self._requests, self._expected):
                found = asker.ask(request)
                self.asked += 1
                if (found.status, found.text) != ("OK", expected.text):
                    self.changed.append(f"{expected.text!r} became {found}")


def bytes_input(name: str, items: Sequence[bytes]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [len(items)], "BYTES")
    tensor.set_data_from_numpy(np.array(list(items), dtype=np.object_))
    return tensor


def flag_input(name: str, value: bool) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def status_and_words(message: str) -> tuple[str, str]:
    """A status written in front of the words, and the words; "" for tritonserver's own refusals."""
    message = PREFIX.sub("", message)
    found = STATUS.match(message)
    return (found[1], message[found.end() :]) if found else ("", message)


def error_words(body: str) -> str:
    """The message of an HTTP error body, which is JSON or an event with JSON."""
    try:
        return str(json.loads(body.removeprefix("data: "))["error"])
    except (ValueError, KeyError, TypeError):
        return body


def text_output(body: str) -> str:
    """The answer in a body of infer, without the tensors in binary behind it."""
    outputs = json.loads(body[: body.rindex("}") + 1]).get("outputs", [])
    (text,) = (output["data"][0] for output in outputs if output["name"] == "text_output")
    return text


def complaint(message: str) -> str | None:
    """Why this error message is no good, or None: it must be short and show nothing of the server's inside."""
    if not message.strip():
        return "the message is empty"
    if len(message) > LONGEST:
        return f"the message has {len(message)} characters: {message[:100]!r}..."
    found = [leak for leak in LEAKS if leak in message]
    return f"the message holds {found[0]!r}: {message!r}" if found else None
