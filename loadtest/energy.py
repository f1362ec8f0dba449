"""Joules of work that is repeated for a second or two, by a GPU's own counter.

The counter is brought up to date every 20 to 100 ms. So watts are what it grew by from one change to another, while
the work was being repeated; seconds a lap come from the laps; joules a lap are the product of both.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_power import GpuPower
from gpu_standins import Captured

AHEAD_S = 0.05  # so much work is launched ahead of the GPU

Lap = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """What one lap took; ``calls``: how many it consists of. Without a counter joules and MHz are not-a-number."""

    seconds: float
    joules: float
    mhz: float
    calls: int = 1

    @property
    def watts(self) -> float:
        return self.joules / self.seconds

    @property
    def us_a_call(self) -> float:
        return 1e6 * self.seconds / self.calls

    @property
    def of_a_call(self) -> Cost:
        return Cost(self.seconds / self.calls, self.joules / self.calls, self.mhz)


@dataclass(frozen=True)
class Repeater:
    """Repeats laps, first for ``settle_s``, in which clocks and watts find their level, then for ``seconds``."""

    power: GpuPower
    device: torch.device
    seconds: float
    settle_s: float

    def recorded(self, calls: list[Lap]) -> Cost:
        """Of all calls, one after the other, in a CUDA graph, so that the host's launches cost nothing."""

        def lap() -> None:
            for call in calls:
                call()

        if self.device.type == "cpu":
            return self.cost(lap, len(calls))
        return self.cost(Captured(lap).replay, len(calls))

    @torch.inference_mode()
    def cost(self, lap: Lap, calls: int = 1) -> Cost:
        """Of a lap that launches work on the current stream."""
        lap()  # whatever it compiles
        self._synchronize()
        started = time.perf_counter()
        lap()
        self._synchronize()
        ahead = max(1, min(500, round(AHEAD_S / (time.perf_counter() - started))))
        under_way: deque[torch.cuda.Event] = deque()
        self._repeat(lap, self.settle_s, under_way, ahead)
        began = time.perf_counter()
        done = self._repeat(lap, self.seconds, under_way, ahead)
        ended = time.perf_counter()
        self._synchronize()
        draw = self.power.between_changes(began, ended)
        seconds = (ended - began) / done
        if draw is None:
            return Cost(seconds, math.nan, math.nan, calls)
        return Cost(seconds, draw.watts * seconds, draw.mhz, calls)

    def _repeat(self, lap: Lap, seconds: float, under_way: deque[torch.cuda.Event], ahead: int) -> int:
        """How many laps have ended when it returns, with one's end; then ``ahead`` of them are ``under_way``."""
        until, done = time.perf_counter() + seconds, 0
        while not done or time.perf_counter() < until:
            lap()
            if self.device.type == "cuda":
                under_way.append(torch.cuda.Event())
                under_way[-1].record()
                if len(under_way) <= ahead:
                    continue
                under_way.popleft().synchronize()
            done += 1
        return done

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
