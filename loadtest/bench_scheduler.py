"""What the scheduler's rules do to a closed loop, without a GPU: the scheduler itself, with steps that take as long as
they were measured to take (`make bench NAME=scheduler`).

    python loadtest/bench_scheduler.py --concurrency 64 --prompt 316 --answer 256

Steps' times are InternVL3-8B's shape in bf16 on one H200 (2026-11-23). A forward of vision takes its time from the
language model's steps. What is not known here: how the two processes slow each other, and the host. Simulated rates
were 2 to 7 % above measured ones.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import shlex
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import counting
import figures
import numpy as np
from engine_load import PICTURE_START

from tessera.engine.cache.block_manager import BlockManager
from tessera.engine.request import Request
from tessera.engine.scheduling import scheduler as scheduling
from tessera.engine.scheduling.batch import ScheduledBatch
from tessera.engine.sequence import Sequence
from tessera.sampling import SamplingParameters

TOKENS = (0, 64, 128, 256, 320, 576, 8192)
STEP_MS = (4.1, 4.85, 5.9, 7.8, 9.7, 15.1, 171.0)
TILE_MS = 1.45  # of the GPU's time
FORWARD_TILES = 16
PREPROCESS_MS = 5.0
HAND_OVER_MS = 1.5  # from vision to the language model, one request at a time
SKIPPED_MS = 10_000.0


class Simulation:
    """A closed loop of ``concurrency`` requests, each of ``tiles``, ``prompt`` and ``answer`` tokens."""

    def __init__(self, concurrency: int, tiles: int, prompt: int, answer: int, seed: int) -> None:
        self.now = 0.0  # ms
        self.first_tokens: list[float] = []
        self.tokens = 0
        self._scheduler = scheduling.Scheduler(BlockManager(400_000, 16), 8192, 256, gathers=True)
        self._sizes, self._random = (tiles, prompt, answer), random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._vision: deque[float] = deque()  # when those that wait there were asked
        self._forward_runs, self._owed, self._handed_over = False, 0.0, 0.0
        self._asked: dict[Sequence, float] = {}
        for _ in range(concurrency):
            self._ask()

    def monotonic_ns(self) -> int:
        """The scheduler's clock."""
        return int(self.now * 1e6)

    def run(self, until: float) -> None:
        """Steps, of which one is launched ahead as the engine does it."""
        under_way: deque[tuple[ScheduledBatch, float]] = deque()
        free = 0.0
        while self.now < until:
            ends_first = bool(under_way) and self._scheduler.ends_first(under_way[-1][0])
            batch = ScheduledBatch([]) if ends_first else self._scheduler.schedule()
            if batch.spans:
                took = float(np.interp(batch.tokens, TOKENS, STEP_MS))
                self._scheduler.took(batch, int(took * 1e6))
                vision = min(self._owed, took)
                self._owed -= vision
                free = max(free, self.now + 0.3) + took + vision
                under_way.append((batch, free))
            if len(under_way) > bool(batch.spans):
                self._apply(*under_way.popleft())
            elif not under_way:
                self._advance(self.now + 0.5)

    def _apply(self, batch: ScheduledBatch, ended: float) -> None:
        self._advance(ended)
        for sequence, _, _ in self._scheduler.apply(batch, [(1, None)] * len(batch.sampling)):
            counts = self.now > SKIPPED_MS
            self.tokens += counts
            if len(sequence.outputs) == 1 and counts:
                self.first_tokens.append(self.now - self._asked[sequence])
            if sequence.finished:
                del self._asked[sequence]
                self._ask()

    def _advance(self, to: float) -> None:
        while self._events and self._events[0][0] <= to:
            at, _, act, arguments = heapq.heappop(self._events)
            self.now = max(self.now, at)
            act(*arguments)
        self.now = max(self.now, to)

    def _at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act, arguments))

    def _ask(self) -> None:
        self._at(self.now + PREPROCESS_MS * self._random.uniform(0.7, 1.5), self._arrive, self.now)

    def _arrive(self, asked: float) -> None:
        self._vision.append(asked)
        self._forward()

    def _forward(self, ended: bool = False) -> None:
        self._forward_runs &= not ended
        if self._forward_runs or not self._vision:
            return
        tiles = self._sizes[0]
        group = [self._vision.popleft() for _ in range(min(len(self._vision), max(1, FORWARD_TILES // tiles)))]
        work = TILE_MS * tiles * len(group)
        self._owed, self._forward_runs = self._owed + work, True
        ends = self.now + 1 + 1.6 * work  # beside steps
        for asked in group:
            self._handed_over = max(self._handed_over, ends) + HAND_OVER_MS
            self._at(self._handed_over, self._submit, asked)
        self._at(ends, self._forward, True)

    def _submit(self, asked: float) -> None:
        _, prompt, answer = self._sizes
        sampling = SamplingParameters(max_tokens=answer, ignore_eos=True)
        ids = np.array([self._random.randrange(1 << 30) for _ in range(prompt)], np.int32)
        spans, digest = np.array([[PICTURE_START, 0]], np.int32), np.zeros(2, np.int64)
        request = Request("", ids, spans, None, digest, sampling)
        sequence = Sequence(replace(request, arrival_ns=self.monotonic_ns()), cache_limit=0)
        self._asked[sequence] = asked
        self._scheduler.add(sequence)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tiles", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=316, help="tokens")
    parser.add_argument("--answer", type=int, default=256, help="tokens")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    if options.seconds <= SKIPPED_MS / 1e3:
        parser.error(f"the first {SKIPPED_MS / 1e3:g} s do not count; give more --seconds")
    simulation = Simulation(options.concurrency, options.tiles, options.prompt, options.answer, seed=1)
    scheduling.time = simulation  # type: ignore[assignment]  # its clock
    simulation.run(1e3 * options.seconds)
    rate = simulation.tokens / (options.seconds - SKIPPED_MS / 1e3)
    first = counting.percentile(sorted(simulation.first_tokens), 0.5)
    name = f"simulated.{options.prompt}to{options.answer}.c{options.concurrency}"
    command = f'make bench NAME=scheduler ARGS="{shlex.join(sys.argv[1:])}"'
    figures.emit(f"{name}.tok_s", round(rate), "tok/s", command, ttft_p50_ms=round(first))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
