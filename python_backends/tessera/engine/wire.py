"""What the stage and its engine's process say to each other, and the socket that they say it over."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tessera.engine.config import EngineConfig
from tessera.engine.request import Request
from tessera.errors import TesseraError


@dataclass(frozen=True, slots=True)
class Start:
    """To the engine, first of all. ``slab``: how to open the stage's slab of rows, None without one."""

    folder: Path
    config: EngineConfig
    slab: tuple[Callable[..., torch.Tensor], Any] | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to Start: the engine's counts, or why it cannot be used."""

    counts: dict[str, int]
    error: TesseraError | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one request: where in the slab, or, outside of it, their bytes."""

    place: int | None
    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A request without its embeddings, and those."""

    request: Request
    rows: Rows | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to Submit: the engine took the request, or why not. Its progress may come before."""

    number: int
    error: TesseraError | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request early, for the reason given."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Count:
    """Asks for Counts."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The engine's counters and gauges."""

    values: dict[str, int]


@dataclass(frozen=True, slots=True)
class Stop:
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
        """Raises EOFError when the other side is gone."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None
