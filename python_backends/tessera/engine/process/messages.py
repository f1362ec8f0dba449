"""What travels between a stage and its engine's process, the socket that it travels over, and how that is begun.

All of it is plain data, cheap to send.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tessera.engine.sequence import Report, Request
from tessera.engine.structured_output.labels import LabelAnswer
from tessera.errors import ConfigError, TesseraError, Unavailable
from tessera.settings.stages import EngineConfig

if TYPE_CHECKING:
    import torch


class Start(NamedTuple):
    """To the engine, first of all; it answers with Ready, or with the TesseraError why it cannot be used.

    ``slab``: how to open the stage's slab of rows, None without one.
    """

    folder: Path
    config: EngineConfig
    slab: tuple[Callable[..., torch.Tensor], Any] | None


class Ready(NamedTuple):
    """The engine's first counts, the kind of its weights in words, and their bytes."""

    counts: dict[str, int]
    weights: str
    weight_bytes: int


class Rows(NamedTuple):
    """Rows of one request: where in the slab, or, outside of it, their bytes."""

    place: int | None
    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def within(self, slab: torch.Tensor) -> torch.Tensor:
        """A view of ``slab``, uint8, at their place; at its beginning where they have none."""
        start = self.place or 0
        return slab[start : start + self.nbytes].view(self.dtype).view(self.shape)


class Submit(NamedTuple):
    """A request without its embeddings, and those. Progress answers it, up to the request's End."""

    request: Request
    rows: Rows | None


class Cancel(NamedTuple):
    """Ends a request early, for the reason given."""

    number: int
    reason: str


class Count(NamedTuple):
    """Asks for Counts."""


class Counts(NamedTuple):
    """The engine's counters and gauges."""

    values: dict[str, int]


class Stop(NamedTuple):
    """Ends all requests, then the engine's process."""


@dataclass(frozen=True, slots=True)
class End:
    """A request's last news. ``reason``: see TokenEvent's ``finish_reason``; ``error``: words for the client;
    ``refusal``: why the engine did not take it; ``drafted_tokens``: see TokenEvent's.

    Times are on time.monotonic_ns's clock, 0 where it did not happen.
    """

    number: int
    reason: str
    error: str | None = None
    cached_tokens: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    labels: LabelAnswer | None = None
    refusal: TesseraError | None = None
    drafted_tokens: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did: tokens for some requests, each by number and with its report and those of one request in
    their order, then the requests that ended.

    Exactly one End of a request is ever told, and nothing of it afterwards.
    """

    tokens: list[tuple[int, int, Report | None]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    @classmethod
    def refused(cls, number: int, refusal: TesseraError) -> Progress:
        """Of a request that the engine did not take."""
        return cls(ends=[End(number, "refused", refusal=refusal)])

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ends)


ENDED = "finished_"  # before a reason in a snapshot


@dataclass
class EngineMetrics:
    """Counters since the start; gauges describe the moment after the last step.

    ``prompts`` began in ``prefill_steps`` of the ``steps``. ``graph_steps``: steps that ran as a CUDA graph;
    ``busy_ns``: time in which a step ran. ``host_wait_ns``: time that planning and launching took beyond what they
    computed, which on a GPU is waiting for the interpreter's lock, or for room in the GPU's queue. ``drafted_steps``
    verified drafts; of answers that have ended ``drafted_tokens`` were verified and ``accepted_tokens`` were right.
    ``not_finite_logits``: requests that ended because their logits were NaN or infinite.
    """

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    graph_steps: int = 0
    prompts: int = 0
    prefill_steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    not_finite_logits: int = 0
    requests_waiting: int = 0
    requests_running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    max_model_len: int = 0
    busy_ns: int = 0
    host_wait_ns: int = 0

    def snapshot(self) -> dict[str, int]:
        """All numbers under flat names; ends of requests as finished_<reason>."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return values | {f"{ENDED}{reason}": count for reason, count in dict(self.finished).items()}


def not_taken() -> Unavailable:
    return Unavailable("the language model could not take the request; the server's log says why")


class Wire:
    """Messages over a connection, sent whole by any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Raises OSError when the other side is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Raises EOFError or OSError when the other side is gone."""
        return pickle.loads(self._connection.recv_bytes())


def start_process(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Runs ``module``, whose one argument is the file descriptor of its end of the connection.

    When either process dies, the other one's end of the connection raises EOFError or OSError. Raises ConfigError where
    there is no interpreter.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [_python(), "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    return process, Connection(ours.detach())


def _python() -> str:
    """The interpreter of this environment; inside the server's stub sys.executable is not one."""
    for candidate in (Path(sys.prefix) / "bin" / "python3", Path(sys.executable)):
        if candidate.name.startswith("python") and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ConfigError(f"no python3 in {sys.prefix} to run a stage's process with")
