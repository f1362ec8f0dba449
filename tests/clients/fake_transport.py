"""Transports without a network: they play a script, one entry an attempt, and note what they were asked to do."""

import threading
from collections.abc import Sequence
from typing import Any

from tessera_client.messages import Delta, LabelScore, ModelStatus, Request, ServedModel, ServerStatus, Timings, Usage
from tessera_client.transports import Deliver, Sent

USAGE = Usage(10, 2, 4)
TIMINGS = Timings(1, 2, 3, 4, 5, 6)
SCORES = (LabelScore("yes", -0.5, 0.6065, 0.75), LabelScore("not sure", -2.5, 0.0821, 0.25))
FINGERPRINT = "0a1b2c3d.4e5f6071.8293a4b5.deterministic"
READY = ServerStatus(True, "2.51.0", (ModelStatus("vlm", "1", "READY"),))


def final(text: str = "", reason: str = "stop") -> Delta:
    return Delta(text, reason, USAGE, TIMINGS, fingerprint=FINGERPRINT)


class Hang:
    """A step of a script at which the server says nothing more."""


class FakeTransport:
    """``script``: for each attempt what it yields: deltas, an error, or Hang."""

    def __init__(self, script: Sequence[Sequence[Any]] = (), status: Any = READY) -> None:
        self.script = list(script)
        self.requests: list[tuple[Request, str, float | None]] = []
        self.cancelled: list[str] = []
        self.closed = False
        self.model: ServedModel | Exception = ServedModel("0" * 32, "qwen2_vl")
        self._status = status
        self._lock = threading.Lock()

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        with self._lock:
            self.requests.append((request, request_id, timeout))
            steps = self.script.pop(0) if self.script else self.answer_to(request)
        sent = Sent(lambda: None, lambda: self.cancelled.append(request_id))
        for step in steps:
            if isinstance(step, Hang):
                return sent
            deliver(step)
            if isinstance(step, Exception):
                return sent
        deliver(None)
        return sent

    def answer_to(self, request: Request) -> Sequence[Any]:
        return [final(f"answer to {request.text}")]

    def served(self) -> ServedModel:
        if isinstance(self.model, Exception):
            raise self.model
        return self.model

    def status(self) -> ServerStatus:
        if isinstance(self._status, Exception):
            raise self._status
        return self._status

    def close(self) -> None:
        self.closed = True
