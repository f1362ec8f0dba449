"""The engine as the stage uses it: in this process, or in one of its own, with the same face."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from tessera.engine.cache.embedding_pool import EmbeddingPool
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.loop import EngineLoop, OnEvents
from tessera.engine.progress import Progress
from tessera.engine.request import Request, TokenEvent
from tessera.engine.sequence import Sequence

# So soon the engine's thread gets the interpreter back from those that make and send text; Python's 5 ms are a step.
SWITCH_S = 0.0005


class Service(Protocol):
    """Takes requests and gives their events to a listener, on a thread of its own."""

    def submit(self, request: Request, rows: torch.Tensor | None = None) -> None:
        """Queues a request without ``embeddings``; its ``rows`` may be reused when this returns.

        Its events may come before that. Raises InvalidRequest when it is malformed or can never fit, Unavailable when
        too many are in flight.
        """

    def abort(self, request: Request) -> None:
        """Ends a request early: its last event, "cancelled", follows. Too late does no harm."""

    def counts(self) -> dict[str, int]:
        """The engine's counters and gauges, and those of the embedding pool."""

    def stop(self) -> None:
        """Ends all requests with reason "error" and waits for the threads; no event comes afterwards."""


class EngineService:
    """The engine on threads of this process; rows of pictures live in its pool until their requests end."""

    def __init__(self, engine: Engine, config: EngineConfig, on_events: OnEvents) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._on_events = on_events
        self._pool = EmbeddingPool(torch.device(config.device), config.embedding_pool_bytes)
        self._lock = threading.Lock()
        self._requests: dict[Request, Request] = {}  # the engine's copy, with the pool's rows -> the caller's
        self._sequences: dict[Request, Sequence] = {}  # by the caller's
        self._engine = engine
        self._loop = EngineLoop(engine, self._pass_on, self._give_back)
        self._loop.start()

    @classmethod
    def from_checkpoint(cls, folder: Path | str, config: EngineConfig, on_events: OnEvents) -> EngineService:
        """Raises as Engine.from_checkpoint."""
        return cls(Engine.from_checkpoint(folder, config), config, on_events)

    def submit(self, request: Request, rows: torch.Tensor | None = None) -> None:
        own = replace(request, embeddings=None if rows is None else self._pool.take(rows))
        with self._lock:  # no event may come before the books are complete
            self._requests[own] = request
            try:
                self._sequences[request] = self._loop.submit(own)
            except Exception:
                del self._requests[own]
                if own.embeddings is not None:
                    self._pool.give_back(own.embeddings)
                raise

    def abort(self, request: Request) -> None:
        with self._lock:
            sequence = self._sequences.get(request)
        if sequence is not None:
            self._loop.abort(sequence)

    def counts(self) -> dict[str, int]:
        return self._engine.metrics.snapshot() | pool_counts(self._pool)

    def stop(self) -> None:
        self._loop.stop()

    def _give_back(self, steps: list[Progress]) -> None:
        for progress in steps:
            if progress.reason is not None and progress.request.embeddings is not None:
                self._pool.give_back(progress.request.embeddings)

    def _pass_on(self, events: list[TokenEvent]) -> None:
        with self._lock:
            theirs = [replace(event, request=self._requests[event.request]) for event in events]
            for event in events:
                if event.finish_reason is not None:
                    self._sequences.pop(self._requests.pop(event.request), None)
        self._on_events(theirs)


def pool_counts(pool: EmbeddingPool) -> dict[str, int]:
    """A pool's part of :meth:`Service.counts`."""
    return {
        "embedding_bytes": pool.used_bytes,
        "embedding_bytes_peak": pool.peak_bytes,
        "embedding_bytes_spilled": pool.spilled_bytes,
        "embeddings_on_cpu": pool.arrived_on_cpu,
    }
