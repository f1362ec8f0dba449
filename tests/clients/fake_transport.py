"""Transports without a network: they play a script, one entry an attempt, and note what they were asked to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tessera_client.errors import Cancelled, DeadlineExceeded
from tessera_client.messages import Delta, LabelScore, ModelStatus, Request, ServerStatus, Timings, Usage

USAGE = Usage(10, 2, 4)
TIMINGS = Timings(1, 2, 3, 4, 5, 6)
SCORES = (LabelScore("yes", -0.5, 0.6065, 0.75), LabelScore("not sure", -2.5, 0.0821, 0.25))
READY = ServerStatus(True, "2.51.0", (ModelStatus("vlm", "1", "READY"),))


def final(text: str = "", reason: str = "stop") -> Delta:
    return Delta(text, reason, USAGE, TIMINGS)


class Hang:
    """A step of a script at which the server says nothing more."""


class FakeTransport:
    """``script``: for each attempt what it yields: deltas, errors to raise, or Hang."""

    def __init__(self, script: Sequence[Sequence[Any]] = (), status: Any = READY) -> None:
        self.script = list(script)
        self.requests: list[tuple[Request, str, float | None]] = []
        self.cancelled: list[str] = []
        self.closed = False
        self._status = status
        self._lock = threading.Lock()

    def send(self, request: Request, request_id: str, timeout: float | None) -> FakeResponses:
        with self._lock:
            self.requests.append((request, request_id, timeout))
            steps = self.script.pop(0) if self.script else self.answer_to(request)
        return FakeResponses(steps, timeout)

    def answer_to(self, request: Request) -> Sequence[Any]:
        return [final(f"answer to {request.text}")]

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def status(self) -> ServerStatus:
        if isinstance(self._status, Exception):
            raise self._status
        return self._status

    def close(self) -> None:
        self.closed = True


class FakeResponses:
    def __init__(self, steps: Sequence[Any], timeout: float | None) -> None:
        self._steps = iter(steps)
        self._timeout = timeout
        self._cancelled = threading.Event()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        step = next(self._steps)
        if isinstance(step, Hang):
            if self._cancelled.wait(self._timeout):
                raise Cancelled("broken off")
            raise DeadlineExceeded("time ran out")
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        self._cancelled.set()


class AsyncFakeTransport:
    """The same script for asyncio."""

    def __init__(self, fake: FakeTransport) -> None:
        self.fake = fake

    def send(self, request: Request, request_id: str, timeout: float | None) -> AsyncFakeResponses:
        return AsyncFakeResponses(self.fake.send(request, request_id, timeout))

    async def cancel(self, request_id: str) -> None:
        self.fake.cancel(request_id)

    async def status(self) -> ServerStatus:
        return self.fake.status()

    async def close(self) -> None:
        self.fake.close()


class AsyncFakeResponses:
    def __init__(self, responses: FakeResponses) -> None:
        self._responses = responses

    def __aiter__(self) -> AsyncFakeResponses:
        return self

    async def __anext__(self) -> Delta:
        import asyncio

        delta = await asyncio.to_thread(next, self._responses, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    def cancel(self) -> None:
        self._responses.cancel()
