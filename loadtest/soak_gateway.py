"""The soak's requests through the gateway, and the gateway itself: :class:`Door`."""

from __future__ import annotations

import base64
import http.client
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera.launcher.guard import descendants

WORKERS = 2
PATH = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


class Door:
    """A gateway's address and processes, and what is asked of it."""

    def __init__(self, address: str, pid: int, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        names = ["gateway", *(f"gateway's {number}" for number in range(1, 9))]  # its workers, and what counts for them
        self.processes = dict(zip([pid, *sorted(descendants(pid))], names))

    def whole(self, picture: bytes, text: str) -> str:
        """The finish reason of an answer that comes at once."""
        return str(self._answer(asked(text, picture, max_tokens=4))["choices"][0]["finish_reason"])

    def streamed(self, picture: bytes, text: str, length: int) -> str:
        """The finish reason of a stream of that many tokens."""
        *events, last = self._events(asked(text, picture, max_tokens=length, ignore_eos=True, stream=True))
        if last != "[DONE]":
            raise AssertionError(f"the stream ended with {last[:200]}")
        reasons = [choice["finish_reason"] for event in events for choice in json.loads(event)["choices"]]
        return str(reasons[-1])

    def left(self, picture: bytes, text: str) -> None:
        """Goes away after the first words of a long answer."""
        for event in self._events(asked(text, picture, max_tokens=2000, ignore_eos=True, stream=True)):
            if event != "[DONE]" and any(choice["delta"].get("content") for choice in json.loads(event)["choices"]):
                return
        raise AssertionError("the stream had no words")

    def refused(self, picture: bytes, text: str, dice: random.Random) -> None:
        """Sends what must be refused, and by which status."""
        attempts: list[tuple[int, Callable[[], Any]]] = [
            (400, lambda: self._answer(asked(text, picture[: len(picture) // 2]))),
            (400, lambda: self._answer(asked(text, picture, beams=4))),
            (404, lambda: self._answer(asked(text, picture, model="another"))),
            (431, lambda: self._answer(asked(text, picture), {"X-Long": "x" * 20_000})),
            (413, lambda: self._answer({**asked(text), "messages": [0] * 200_000})),
        ]
        status, attempt = dice.choice(attempts)
        try:
            attempt()
        except Refused as refusal:
            if refusal.status == status:
                return
            raise
        raise AssertionError(f"what should be refused by {status} was answered")

    def _answer(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        with self._sent(body, headers or {}) as response:
            return json.loads(response.read())

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        with self._sent(body, {}) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    @contextmanager
    def _sent(self, body: dict[str, Any], headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout)
        try:
            connection.request("POST", PATH, json.dumps(body), {**JSON, **headers})
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(response.status, response.read())
            yield response
        finally:
            connection.close()


class Refused(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:200]!r}")
        self.status = status


def asked(text: str, picture: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """A request's body."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"model": "vlm", "messages": [{"role": "user", "content": content}], **fields}


@contextmanager
def door(server: str, timeout: float) -> Iterator[Door]:
    """A gateway before a server, by its gRPC address."""
    command = [sys.executable, "-m", "tessera_gateway.cli", "--url", server, "--port", "0", "--workers", str(WORKERS)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready: " not in line:
                raise RuntimeError(f"the gateway did not start: {line!r}")
            yield Door(line.rpartition("//")[2].strip(), process.pid, timeout)
        finally:
            process.terminate()
