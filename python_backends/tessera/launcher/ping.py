"""Asks each stage whether it is alive, for a process that is there may hang all the same.

A stage takes part if its model has the BYTES input ``PING``: it answers such a request, whatever else it has to do,
by any response without an error. A long queue or a long forward is no death: a stage is dead when for a whole
``timeout_s`` it has neither answered nor completed any other request.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SERVER = "tritonserver"  # the name under which the server itself is asked
QUESTION_TIMEOUT_S = 5.0


class NoAnswer(Exception):
    """A request that brought nothing useful; ``status`` is the HTTP status if there was one."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Ping:
    """One stage's ping as an HTTP request."""

    stage: str
    method: str
    path: str
    body: bytes = b""
    counted: bool = True
    """Whether the stage has a count of completed requests."""


class Pinger:
    """Pings every stage of one running server, one at a time a stage, each on its own thread."""

    def __init__(self, host: str, port: int, models: Sequence[str], interval_s: float, timeout_s: float):
        self._address = (host, port)
        self._models = models
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[float, float]] = {}
        self._failure: str | None = None

    def start(self) -> Pinger:
        """Finds out which models take pings and begins. Raises NoAnswer if the server does not say."""
        configurations = (self._json(f"/v2/models/{model}/config") for model in self._models)
        pings = [made for configuration in configurations if (made := ping_of(configuration))]
        for ping in [Ping(SERVER, "GET", "/v2/health/live", counted=False), *pings]:
            threading.Thread(target=self._watch, args=(ping,), name=f"ping-{ping.stage}", daemon=True).start()
        return self

    def stop(self) -> None:
        """No ping is sent any more; one under way is not waited for."""
        self._stopped.set()

    def failure(self) -> str | None:
        """Which stage is dead, or None."""
        with self._lock:
            return self._failure

    def last(self, stage: str) -> tuple[float, float] | None:
        """(round trip in milliseconds, age in seconds) of the stage's last answer; None before the first."""
        with self._lock:
            answer = self._answers.get(stage)
        return None if answer is None else (answer[0], time.monotonic() - answer[1])

    def _watch(self, ping: Ping) -> None:
        alive = time.monotonic()
        while not self._stopped.is_set():
            asked = time.monotonic()
            completed = None
            try:
                completed = self._completed(ping)
                request(self._address, ping.method, ping.path, self._timeout_s, ping.body)
                alive = time.monotonic()
                with self._lock:
                    self._answers[ping.stage] = ((alive - asked) * 1e3, alive)
            except NoAnswer as error:
                if self._excused(ping, error, completed):
                    alive = time.monotonic()
                elif time.monotonic() - alive >= self._timeout_s:
                    with self._lock:
                        self._failure = f"{ping.stage} has not answered for {self._timeout_s:g} s ({error})"
                    return
            # A ping that waited long for nothing is followed by the next one soon.
            self._stopped.wait(max(0.1, self._interval_s - (time.monotonic() - asked)))

    def _excused(self, ping: Ping, error: NoAnswer, before: int | None) -> bool:
        """Whether the stage has done other work meanwhile, or is not loaded at all (somebody's decision)."""
        if not ping.counted:
            return False
        try:
            after = self._completed(ping)
        except NoAnswer as later:
            return later.status == 400
        return before is not None and after is not None and after > before

    def _completed(self, ping: Ping) -> int | None:
        """How many requests the stage has answered so far."""
        if not ping.counted:
            return None
        statistics = self._json(f"/v2/models/{ping.stage}/stats")["model_stats"]
        return sum(int(version["inference_stats"]["success"]["count"]) for version in statistics)

    def _json(self, path: str) -> Any:
        return json.loads(request(self._address, "GET", path, min(QUESTION_TIMEOUT_S, self._timeout_s)))


def request(address: tuple[str, int], method: str, path: str, timeout_s: float, body: bytes = b"") -> bytes:
    """Body of a 200 answer; raises NoAnswer. One connection a call: an idle one would delay the server's end."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        data = response.read()
    except TimeoutError:
        raise NoAnswer("no answer") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    if response.status != 200:
        raise NoAnswer(" ".join(data[:200].decode("utf-8", "replace").split()), response.status)
    return data


def ping_of(configuration: dict[str, Any]) -> Ping | None:
    """The ping of the model with this configuration (as /v2/models/NAME/config has it); None if it takes none."""
    if not any(i["name"] == "PING" and i["data_type"] == "TYPE_STRING" for i in configuration.get("input", [])):
        return None
    model = configuration["name"]
    if configuration.get("model_transaction_policy", {}).get("decoupled"):
        body: dict[str, Any] = {"PING": "alive?"}  # infer refuses decoupled models; this may end without a response
        path = f"/v2/models/{model}/generate_stream"
    else:
        shape = [1, 1] if configuration.get("max_batch_size", 0) > 0 else [1]
        body = {"inputs": [{"name": "PING", "shape": shape, "datatype": "BYTES", "data": ["alive?"]}]}
        path = f"/v2/models/{model}/infer"
    return Ping(model, "POST", path, json.dumps(body).encode())
