"""Loads on an engine in this process: prompts that no cache can help, steps one by one, and closed loops."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from tessera.engine.engine import Engine
from tessera.engine.process.messages import End, Progress
from tessera.engine.sequence import Request
from tessera.prompt.sampling import SamplingParameters

PROMPT_TOKENS = 316
PICTURE_ROWS = 256
PICTURE_START = 12
ROWS_STD = 0.02  # as text embeddings have it
PICTURES = 64


class Prompts:
    """Makes requests, of W1's size unless told otherwise, with the picture's rows given; no two have a block of tokens
    in common.

    The rows themselves (bfloat16 [picture_rows, hidden], on ``device``) repeat after 64 requests, the digests never do.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        device: str,
        seed: int = 0,
        tokens: int = PROMPT_TOKENS,
        picture_rows: int = PICTURE_ROWS,
    ) -> None:
        self._tokens, self._picture_rows = tokens, picture_rows
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.empty(PICTURES, picture_rows, hidden_size, dtype=torch.bfloat16, device=device)
        self._rows = itertools.cycle(rows.normal_(0, ROWS_STD, generator=generator))
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def request(self, max_tokens: int) -> Request:
        """A greedy request whose answer has exactly ``max_tokens`` tokens."""
        number = next(self._numbers)
        return Request(
            request_id=str(number),
            input_ids=self._random.integers(0, self._vocab_size, self._tokens, dtype=np.int32),
            spans=np.array([[PICTURE_START, self._picture_rows]], np.int32),
            embeddings=next(self._rows),
            digest=np.array([number, self._tokens], np.int64),
            sampling=SamplingParameters(max_tokens=max_tokens, ignore_eos=True),
        )


def check(progress: Progress) -> None:
    """Raises RuntimeError for a request that ended otherwise than by its length: it would spoil the figure."""
    for end in progress.ends:
        if end.reason != "length":
            raise RuntimeError(f"request {end.number} ended by {end.reason}: {end.error}")


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
        progress = engine.step()
        marks.append((time.perf_counter(), engine.metrics.computed_tokens))
        check(progress)
        under_way -= len(progress.ends)
    (begun, before), (ended, after) = marks[warm_up], marks[warm_up + steps]
    return (after - before) / (ended - begun), (after - before) / steps


def decode_step_s(engine: Engine, prompts: Prompts, batch: int, skip: int, steps: int, max_tokens: int) -> list[float]:
    """Seconds from one step's tokens to the next's, of ``steps`` steps after the batch has ``skip`` tokens each."""
    requests = [prompts.request(max_tokens) for _ in range(batch)]
    for request in requests:
        engine.submit(request)
    tokens = 0
    stamps: list[float] = []
    while engine.has_work():
        progress = engine.step()
        now = time.perf_counter()
        got = len(progress.tokens)
        tokens += got
        if not got or tokens < skip * batch or len(stamps) > steps:
            continue
        check(progress)
        if got != batch:
            raise RuntimeError(f"a step of {batch} decoding requests gave {got} tokens")
        stamps.append(now)
        if len(stamps) > steps:
            for request in requests:
                engine.cancel(request.number)
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
    """Steps an engine and submits a new request whenever one has ended."""

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._engine = engine
        self._prompts = prompts
        self._arrivals: dict[int, int] = {}
        self._marks = [_Mark(0.0, 0, 0)]
        self._waits_ns: list[int] = []

    def measure(self, load: Load, watch: AbstractContextManager[object] | None = None) -> Outcome:
        """Warms up, then lets ``load.requests`` end while ``watch`` is entered, then lets the rest end.

        Raises RuntimeError when a request fails.
        """
        self._marks = [_Mark(0.0, 0, 0)]
        for _ in range(load.concurrency):
            self._submit(load)
        self._follow(load, load.warm_up)
        self._waits_ns = []
        with watch or nullcontext():
            self._follow(load, load.warm_up + load.requests)
        waits = self._waits_ns
        while self._engine.has_work():
            self._step()
        # From step to step, since requests end in bunches.
        first = next(mark for mark in self._marks if mark.ended >= load.warm_up)
        last = next(mark for mark in self._marks if mark.ended >= load.warm_up + load.requests)
        return Outcome(
            last.ended - first.ended, last.tokens - first.tokens, last.time - first.time, median(waits) / 1e6
        )

    def _follow(self, load: Load, count: int) -> None:
        """Submits a new request for each that ends until ``count`` have."""
        while self._marks[-1].ended < count:
            for _ in self._step():
                self._submit(load)

    def _submit(self, load: Load) -> None:
        request = self._prompts.request(load.max_tokens)
        self._arrivals[request.number] = request.arrival_ns
        self._engine.submit(request)

    def _step(self) -> list[End]:
        progress = self._engine.step()
        check(progress)
        last = self._marks[-1]
        mark = _Mark(time.perf_counter(), last.ended + len(progress.ends), last.tokens + len(progress.tokens))
        self._marks.append(mark)
        self._waits_ns += [end.first_token_ns - self._arrivals.pop(end.number) for end in progress.ends]
        return progress.ends
