"""The engine in a process of its own, so that nobody else's work holds up its interpreter.

The engine's process steps and nothing else. Requests are taken over, and text is made of their tokens, in the process
that started it (the parent, the stage); both speak over a socket. Rows of pictures on a GPU stay in one slab that the
parent allocates and the child opens once (by CUDA's inter-process handle: opening and closing one for every request
stops the GPU's queue each time). When either process dies, so does the other.
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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tessera.engine.cache.embedding_pool import EmbeddingPool, rows_at
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.loop import OnEvents, StepThread, TextThread
from tessera.engine.metrics import ended_counts
from tessera.engine.progress import Progress
from tessera.engine.rendering import Renderer
from tessera.engine.request import Request
from tessera.engine.sequence import Sequence
from tessera.engine.service import SWITCH_S, pool_counts
from tessera.errors import CheckpointError, ConfigError, InvalidRequest, TesseraError, Unavailable
from tessera.family.tokenizer import Tokenizer

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
        self._on_death = on_death
        self._lock = threading.Lock()  # guards what follows
        self._numbers: dict[Request, int] = {}
        self._under_way: dict[int, _UnderWay] = {}  # until the engine has ended them
        self._taken: dict[int, Future[None]] = {}
        self._next = 0
        self._stopping = False
        self._counts: dict[str, int] = {}
        self._finished: Counter[str] = Counter()
        try:
            self._pool = EmbeddingPool(torch.device(config.device), config.embedding_pool_bytes)
            self._wire.send("start", str(folder), config, _shared(self._pool.slab))
            name, *rest = self._wire.receive()
        except (EOFError, BrokenPipeError):
            raise ConfigError("the engine's process ended before it was ready; the server's log says why") from None
        if name == "failed":
            self._process.wait()
            raise _error(*rest)
        self._counts = rest[0]
        renderer = Renderer(Tokenizer.from_folder(Path(folder)), self._end_by_text, self._finished)
        self._text = TextThread(renderer.render, on_events)
        self._text.start()
        self._reader = threading.Thread(target=self._read, name="engine-process", daemon=True)
        self._reader.start()

    def submit(self, request: Request, rows: torch.Tensor | None = None) -> None:
        taken: Future[None] = Future()
        kept = None if rows is None else self._pool.take(rows)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._numbers[request], self._under_way[number] = number, _UnderWay(request, kept)
            self._taken[number] = taken
        try:
            self._wire.send("submit", number, request, None if kept is None else self._row_message(kept))
            taken.result()
        except Exception as error:
            with self._lock:
                self._taken.pop(number, None)
            self._forget(number)
            if isinstance(error, TesseraError):
                raise
            raise Unavailable("the engine's process is gone; the server starts anew") from error

    def abort(self, request: Request) -> None:
        self._tell("abort", request)

    def counts(self) -> dict[str, int]:
        return self._counts | ended_counts(self._finished) | pool_counts(self._pool)

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):  # it may be gone already
            self._wire.send("stop")
        self._reader.join()
        self._text.stop()
        self._process.wait()

    def _row_message(self, kept: torch.Tensor) -> RowMessage:
        place = self._pool.place_of(kept)
        whole = b"" if place is not None else kept.contiguous().view(torch.uint8).numpy().tobytes()
        return RowMessage(place, whole, kept.dtype, tuple(kept.shape))

    def _end_by_text(self, request: Request) -> None:
        self._tell("end_by_text", request)

    def _tell(self, what: str, request: Request) -> None:
        with self._lock:
            number = self._numbers.get(request)
        if number is not None:
            with contextlib.suppress(OSError):  # its death is noticed elsewhere
                self._wire.send(what, number)

    def _read(self) -> None:
        try:
            while True:
                name, *rest = self._wire.receive()
                if name == "taken":
                    self._answer(*rest)
                elif name == "progress":
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
        """A request was taken or refused; its progress, the last one too, may have come before."""
        with self._lock:
            taken = self._taken.pop(number, None)
        if taken is None:
            return
        if failure is None:
            taken.set_result(None)
        else:
            taken.set_exception(_error(*failure))

    def _pass_on(self, steps: list[tuple[Any, ...]]) -> None:
        with self._lock:
            progress = [Progress(self._under_way[number].request, *rest) for number, *rest in steps]
        for (number, *_), step in zip(steps, progress):
            if step.reason is not None:
                self._forget(number)
        self._text.put(progress)

    def _forget(self, number: int) -> None:
        with self._lock:
            known = self._under_way.pop(number, None)
            if known is None:
                return
            del self._numbers[known.request]
        if known.rows is not None:
            self._pool.give_back(known.rows)


class _UnderWay(NamedTuple):
    request: Request
    rows: torch.Tensor | None  # the pool's


class RowMessage(NamedTuple):
    """Rows of one request: where in the slab, or, outside of it, their bytes."""

    place: int | None
    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


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


class Child:
    """The engine's side: serves one parent until it says stop or is gone."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._slab: torch.Tensor | None = None
        self._requests: dict[int, Sequence] = {}
        self._numbers: dict[Request, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def serve(self) -> None:
        _, folder, config, slab = self._wire.receive()
        try:
            self._engine = Engine.from_checkpoint(folder, config)
        except TesseraError as error:
            self._wire.send("failed", *_described(error))
            return
        self._slab = None if slab is None else slab[0](*slab[1])
        self._pinned = torch.device(config.device).type == "cuda"
        self._steps = StepThread(self._engine, self._send_progress)
        self._steps.start()
        self._wire.send("ready", self._engine.metrics.snapshot())
        counting = threading.Thread(target=self._count, name="counts", daemon=True)
        counting.start()
        try:
            while (message := self._wire.receive())[0] != "stop":
                getattr(self, f"_on_{message[0]}")(*message[1:])
            self._steps.stop()
            self._slab = None  # CUDA tells the parent that nobody reads it any more
        except EOFError:
            pass  # the parent is gone: nobody waits for an answer any more
        self._stop.set()
        counting.join()

    def _on_submit(self, number: int, request: Request, rows: RowMessage | None) -> None:
        failure = None
        try:
            own = replace(request, embeddings=None if rows is None else self._rows(rows))
            with self._lock:  # no progress may come before the books are complete
                self._numbers[own] = number
                try:
                    self._requests[number] = self._steps.submit(own)
                except Exception:
                    del self._numbers[own]
                    raise
        except Exception as error:
            if not isinstance(error, TesseraError):
                _LOG.exception("a request could not be taken")
            failure = _described(error)
        self._wire.send("taken", number, failure)

    def _rows(self, message: RowMessage) -> torch.Tensor:
        if message.place is not None:
            assert self._slab is not None
            return rows_at(self._slab, message.place, message.shape, message.dtype)
        rows = torch.frombuffer(bytearray(message.data), dtype=torch.uint8)
        return rows_at(rows.pin_memory() if self._pinned else rows, 0, message.shape, message.dtype)

    def _on_abort(self, number: int) -> None:
        sequence = self._known(number)
        if sequence is not None:
            self._steps.abort(sequence)

    def _on_end_by_text(self, number: int) -> None:
        sequence = self._known(number)
        if sequence is not None:
            self._engine.stop(sequence.request)

    def _known(self, number: int) -> Sequence | None:
        with self._lock:
            return self._requests.get(number)

    def _send_progress(self, steps: list[Progress]) -> None:
        with self._lock:
            numbered = [(self._numbers[step.request], *step[1:]) for step in steps]
            for step in steps:
                if step.reason is not None:
                    del self._requests[self._numbers.pop(step.request)]
        if numbered:
            self._wire.send("progress", numbered)

    def _count(self) -> None:
        try:
            while not self._stop.wait(_COUNTS_S):
                self._wire.send("counts", self._engine.metrics.snapshot())
        except OSError:
            pass  # the parent is gone


def _shared(slab: torch.Tensor | None) -> tuple[Callable[..., torch.Tensor], Any] | None:
    """What the child needs to open the slab."""
    if slab is None:
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(slab)


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
    sys.setswitchinterval(SWITCH_S)
    child = Child(Wire(Connection(int(sys.argv[1]))))
    child.serve()
    # The wire is closed; whatever else still runs (a step that waits for a GPU) must not keep the process.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
