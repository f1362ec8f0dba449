"""Loads on an engine in this process: prompts that no cache can help, steps one by one, and closed loops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from statistics import median
from types import TracebackType

import numpy as np
import torch

from tessera.engine.engine import Engine
from tessera.engine.loop import EngineLoop
from tessera.engine.request import Request, TokenEvent
from tessera.sampling import SamplingParameters

PROMPT_TOKENS = 316
PICTURE_ROWS = 256
PICTURE_START = 12
ROWS_STD = 0.02  # as text embeddings have it
PICTURES = 64
PATIENCE_S = 120.0


class Prompts:
    """Makes requests of W1's size with the picture's rows given; no two have a block of tokens in common.

    The rows themselves (bfloat16 [256, hidden], on ``device``) repeat after 64 requests, the digests never do.
    """

    def __init__(self, hidden_size: int, vocab_size: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.empty(PICTURES, PICTURE_ROWS, hidden_size, dtype=torch.bfloat16, device=device)
        self._rows = itertools.cycle(rows.normal_(0, ROWS_STD, generator=generator))
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def request(self, max_tokens: int) -> Request:
        """A greedy request whose answer has exactly ``max_tokens`` tokens."""
        number = next(self._numbers)
        return Request(
            request_id=str(number),
            input_ids=self._random.integers(0, self._vocab_size, PROMPT_TOKENS, dtype=np.int32),
            spans=np.array([[PICTURE_START, PICTURE_ROWS]], np.int32),
            embeddings=next(self._rows),
            digest=np.array([number, PROMPT_TOKENS], np.int64),
            sampling=SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        )


def check(events: Iterable[TokenEvent]) -> None:
    """Raises RuntimeError for a request that ended otherwise than by its length: it would spoil the figure."""
    for event in events:
        if event.finish_reason not in (None, "length"):
            raise RuntimeError(f"request {event.request.request_id} ended by {event.finish_reason}: {event.error}")


def prefill_tokens_per_s(
    engine: Engine, prompts: Prompts, warm_up: int, steps: int, budget: int, waiting: int
) -> tuple[float, float]:
    """(tokens a second, tokens a step) over ``steps`` steps after ``warm_up`` ones.

    All steps are prefill of single-token requests, of which ``waiting`` are kept under way, so that each step has its
    ``budget`` of tokens full.
    """
    # Two steps more than are measured: the last one must be full, and the one planned while it runs.
    left = -(-(warm_up + steps + 2) * budget // PROMPT_TOKENS)
    under_way = 0
    marks: list[tuple[float, int]] = []
    while left or engine.has_work():
        fresh = min(left, waiting - under_way)
        for _ in range(fresh):
            engine.submit(prompts.request(max_tokens=1))
        left, under_way = left - fresh, under_way + fresh
        events = engine.step()
        marks.append((time.perf_counter(), engine.metrics.computed_tokens))
        check(events)
        under_way -= sum(event.finish_reason is not None for event in events)
    (begun, before), (ended, after) = marks[warm_up], marks[warm_up + steps]
    return (after - before) / (ended - begun), (after - before) / steps


def decode_step_s(engine: Engine, prompts: Prompts, batch: int, skip: int, steps: int, max_tokens: int) -> list[float]:
    """Seconds from one step's tokens to the next's, of ``steps`` steps after the batch has ``skip`` tokens each."""
    sequences = [engine.submit(prompts.request(max_tokens)) for _ in range(batch)]
    tokens = 0
    stamps: list[float] = []
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter()
        got = sum(len(event.token_ids) for event in events)
        tokens += got
        if not got or tokens < skip * batch or len(stamps) > steps:
            continue
        check(events)
        if got != batch:
            raise RuntimeError(f"a step of {batch} decoding requests gave {got} tokens")
        stamps.append(now)
        if len(stamps) > steps:
            for sequence in sequences:
                engine.abort(sequence)
    if len(stamps) <= steps:
        raise RuntimeError(f"{max_tokens} tokens are too few for {skip} steps to skip and {steps} to measure")
    return [after - before for before, after in itertools.pairwise(stamps)]


@dataclass(frozen=True)
class Load:
    """A closed loop: ``concurrency`` requests of ``max_tokens`` under way; ``requests`` count after ``warm_up``."""

    max_tokens: int
    concurrency: int
    warm_up: int
    requests: int


@dataclass(frozen=True)
class Outcome:
    """What a closed loop gave from the end of one step to the end of another."""

    requests: int
    tokens: int
    seconds: float
    ttft_p50_ms: float


@dataclass(frozen=True)
class _Mark:
    """The end of a step: when, and how many requests had ended and tokens come by then."""

    time: float
    ended: int
    tokens: int


class ClosedLoop:
    """Drives an engine as the stage does: it steps on its own thread, this one submits whenever a request ended.

    Leaving the ``with`` block stops the engine for good.
    """

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._prompts = prompts
        self._ended: SimpleQueue[TokenEvent] = SimpleQueue()
        self._marks = [_Mark(0.0, 0, 0)]
        self._loop = EngineLoop(engine, self._on_events)

    def __enter__(self) -> ClosedLoop:
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.stop()

    def measure(self, load: Load, watch: AbstractContextManager[object] | None = None) -> Outcome:
        """Warms up, then lets ``load.requests`` end while ``watch`` is entered, then lets the rest end.

        Raises RuntimeError when a request fails or none ends for two minutes.
        """
        self._marks = [_Mark(0.0, 0, 0)]
        for _ in range(load.concurrency):
            self._submit(load)
        self._follow(load, load.warm_up)
        with watch or nullcontext():
            ended = self._follow(load, load.requests)
        for _ in range(load.concurrency):
            self._take()
        # From step to step, since requests end in bunches.
        first = next(mark for mark in self._marks if mark.ended >= load.warm_up)
        last = next(mark for mark in self._marks if mark.ended >= load.warm_up + load.requests)
        waits = [event.first_token_ns - event.request.arrival_ns for event in ended]
        return Outcome(
            last.ended - first.ended, last.tokens - first.tokens, last.time - first.time, median(waits) / 1e6
        )

    def _follow(self, load: Load, count: int) -> list[TokenEvent]:
        """Submits a new request for each of the next ``count`` that end; returns their last events."""
        ended = []
        for _ in range(count):
            ended.append(self._take())
            self._submit(load)
        return ended

    def _submit(self, load: Load) -> None:
        self._loop.submit(self._prompts.request(load.max_tokens))

    def _take(self) -> TokenEvent:
        try:
            event = self._ended.get(timeout=PATIENCE_S)
        except Empty:
            raise RuntimeError(f"no request ended for {PATIENCE_S:g} s") from None
        check([event])
        return event

    def _on_events(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        last = self._marks[-1]
        ends = [event for event in events if event.finish_reason is not None]
        tokens = sum(len(event.token_ids) for event in events)
        # The mark comes first: whoever takes an end from the queue finds it counted.
        self._marks.append(_Mark(now, last.ended + len(ends), last.tokens + tokens))
        for event in ends:
            self._ended.put(event)
