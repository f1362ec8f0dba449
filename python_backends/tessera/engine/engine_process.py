"""The engine in a process of its own, so that nobody else's work holds up its interpreter.

The parent speaks to it over a socket: requests and aborts one way, events and counts the other. Rows of pictures on a
GPU cross by CUDA's inter-process handles and are copied by the engine before :meth:`EngineProcess.submit` returns.
When either process dies, so does the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tessera.engine.config import EngineConfig
from tessera.engine.request import Request, TokenEvent
from tessera.engine.service import EngineService, OnEvents
from tessera.errors import CheckpointError, ConfigError, InvalidRequest, TesseraError, Unavailable

_LOG = logging.getLogger(__name__)
_COUNTS_S = 0.25
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, InvalidRequest, Unavailable)}


class EngineProcess:
    """The parent's side; a Service whose engine runs elsewhere.

    ``on_death`` is called once, on a thread of this process, when the engine's process has died.
    """

    def __init__(
        self, folder: Path | str, config: EngineConfig, on_events: OnEvents, on_death: Callable[[], None]
    ) -> None:
        """Starts the process and waits until it is ready; raises as Engine.from_checkpoint."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [_python(), "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._wire = Wire(Connection(ours.detach()))
        self._on_events = on_events
        self._on_death = on_death
        self._lock = threading.Lock()  # guards what follows
        self._numbers: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._taken: dict[int, Future[None]] = {}
        self._next = 0
        self._stopping = False
        self._counts: dict[str, int] = {}
        try:
            self._wire.send("start", str(folder), config)
            name, *rest = self._wire.receive()
        except EOFError:
            raise ConfigError("the engine's process ended before it was ready; the server's log says why") from None
        if name == "failed":
            self._process.wait()
            raise _error(*rest)
        self._counts = rest[0]
        self._reader = threading.Thread(target=self._read, name="engine-process", daemon=True)
        self._reader.start()

    def submit(self, request: Request, rows: torch.Tensor | None = None) -> None:
        taken: Future[None] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._numbers[request], self._requests[number], self._taken[number] = number, request, taken
        try:
            shared, kept = (None, None) if rows is None else share(rows)
            self._wire.send("submit", number, request, shared)
            taken.result()  # until then the rows are read
            del kept
        except Exception as error:
            with self._lock:
                self._taken.pop(number, None)
            self._forget(number)
            if isinstance(error, TesseraError):
                raise
            raise Unavailable("the engine's process is gone; the server starts anew") from error

    def abort(self, request: Request) -> None:
        with self._lock:
            number = self._numbers.get(request)
        if number is not None:
            self._wire.send("abort", number)

    def counts(self) -> dict[str, int]:
        return self._counts

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):  # it may be gone already
            self._wire.send("stop")
        self._reader.join()
        self._process.wait()

    def _read(self) -> None:
        try:
            while True:
                name, *rest = self._wire.receive()
                if name == "taken":
                    self._answer(*rest)
                elif name == "events":
                    self._pass_on(rest[0])
                else:
                    self._counts = rest[0]
        except (EOFError, OSError):
            pass
        except Exception:  # whatever it was: nobody would hear of the engine any more, which is as bad as its death
            _LOG.exception("a message of the engine's process could not be understood")
            self._process.kill()
        with self._lock:
            waiting, self._taken = list(self._taken.values()), {}
        for future in waiting:
            future.set_exception(EOFError())
        if not self._stopping:
            _LOG.error("the engine's process died with exit code %s", self._process.wait())
            self._on_death()

    def _answer(self, number: int, failure: tuple[str, str] | None) -> None:
        """A request was taken or refused; its events, the last one too, may have come before."""
        with self._lock:
            taken = self._taken.pop(number, None)
        if taken is None:
            return
        if failure is None:
            taken.set_result(None)
        else:
            taken.set_exception(_error(*failure))

    def _pass_on(self, events: list[tuple[int, Any]]) -> None:
        with self._lock:
            theirs = [replace(event, request=self._requests[number]) for number, event in events]
        for number, event in events:
            if event.finish_reason is not None:
                self._forget(number)
        try:
            self._on_events(theirs)
        except Exception:
            _LOG.exception("delivering %d events failed", len(theirs))

    def _forget(self, number: int) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
            if request is not None:
                del self._numbers[request]


class Wire:
    """Messages (name, ...) over a connection, sent whole by any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> tuple[Any, ...]:
        """Raises EOFError when the other side is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None


def share(rows: torch.Tensor) -> tuple[tuple[Any, ...], torch.Tensor]:
    """What another process needs to open the rows, and a tensor to keep until it has: a GPU's rows stay there."""
    if rows.is_cuda:
        from torch.multiprocessing.reductions import reduce_tensor

        own = rows.clone()  # the rows' own memory may be a third process's, which cannot be handed on
        torch.cuda.current_stream(rows.device).synchronize()
        return reduce_tensor(own), own
    whole = rows.contiguous()
    return (_from_bytes, (whole.view(torch.uint8).numpy().tobytes(), whole.dtype, tuple(whole.shape))), whole


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


class Child:
    """The engine's side: serves one parent until it says stop or is gone."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def serve(self) -> None:
        _, folder, config = self._wire.receive()
        try:
            self._service = EngineService.from_checkpoint(folder, config, self._send_events)
        except TesseraError as error:
            self._wire.send("failed", *_described(error))
            return
        self._wire.send("ready", self._service.counts())
        counting = threading.Thread(target=self._count, name="counts", daemon=True)
        counting.start()
        try:
            while (message := self._wire.receive())[0] != "stop":
                getattr(self, f"_on_{message[0]}")(*message[1:])
            self._service.stop()
        except EOFError:
            pass  # the parent is gone: nobody waits for an answer any more
        self._stop.set()
        counting.join()

    def _on_submit(self, number: int, request: Request, rows: tuple[Callable[..., torch.Tensor], Any] | None) -> None:
        failure = None
        try:
            with self._lock:
                self._requests[number], self._numbers[request] = request, number
            self._service.submit(request, None if rows is None else rows[0](*rows[1]))
        except Exception as error:
            if not isinstance(error, TesseraError):
                _LOG.exception("a request could not be taken")
            failure = _described(error)
            with self._lock:
                self._numbers.pop(self._requests.pop(number, request), None)
        self._wire.send("taken", number, failure)

    def _on_abort(self, number: int) -> None:
        with self._lock:
            request = self._requests.get(number)
        if request is not None:
            self._service.abort(request)

    def _send_events(self, events: list[TokenEvent]) -> None:
        numbered = []
        with self._lock:
            for event in events:
                number = self._numbers[event.request]
                numbered.append((number, replace(event, request=None)))  # type: ignore[arg-type]
                if event.finish_reason is not None:
                    del self._numbers[event.request], self._requests[number]
        self._wire.send("events", numbered)

    def _count(self) -> None:
        try:
            while not self._stop.wait(_COUNTS_S):
                self._wire.send("counts", self._service.counts())
        except OSError:
            pass  # the parent is gone


def _described(error: BaseException) -> tuple[str, str]:
    """An error of ours by name and words; any other is Unavailable, as its words are for the log."""
    name = type(error).__name__
    if name in _ERRORS:
        return name, str(error)
    return "Unavailable", "the language model could not take the request; the server's log says why"


def _error(name: str, words: str) -> TesseraError:
    return _ERRORS[name](words)


def _python() -> str:
    """The interpreter of this environment; inside the server's stub sys.executable is not one."""
    for candidate in (Path(sys.prefix) / "bin" / "python3", Path(sys.executable)):
        if candidate.name.startswith("python") and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ConfigError(f"no python3 in {sys.prefix} to run the engine's process with; set engine_process to 0")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="language_model: %(message)s")
    child = Child(Wire(Connection(int(sys.argv[1]))))
    child.serve()
    # The wire is closed; whatever else still runs (a step that waits for a GPU) must not keep the process.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
