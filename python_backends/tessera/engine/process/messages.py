"""What the stage and its engine's process say to each other, and the socket that they say it over."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tessera.engine.sequence import Request
from tessera.errors import TesseraError
from tessera.settings.stages import EngineConfig


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


class Submit(NamedTuple):
    """A request without its embeddings, and those."""

    request: Request
    rows: Rows | None


class Taken(NamedTuple):
    """The answer to Submit: the engine took the request, or why not. Its progress may come before."""

    number: int
    error: TesseraError | None


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
