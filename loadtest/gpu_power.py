"""What GPUs draw, how fast they are clocked and how warm they get while a load runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from types import TracebackType
from typing import NamedTuple

import pynvml

from tessera.settings.gpu import GpuMeter

INTERVAL_S = 0.1


class Reading(NamedTuple):
    """Of some GPUs at one moment: joules since their driver was loaded, in sum; the mean SM clock in MHz; the mean
    share of NVML's last period (a sixth of a second or more) in which anything ran on one."""

    joules: float
    mhz: float
    busy: float

    @classmethod
    def of(cls, meter: GpuMeter) -> Reading:
        """Raises OSError if a GPU does not answer."""
        joules, cards = meter.joules(), meter.handles
        try:
            clocks = [pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM) for card in cards]
            busy = [pynvml.nvmlDeviceGetUtilizationRates(card).gpu for card in cards]
        except pynvml.NVMLError as error:
            raise OSError(f"a GPU does not say how it fares: {error}") from error
        return cls(joules, fmean(clocks), fmean(busy) / 100)


#: when, by time.perf_counter(), and what
Sample = tuple[float, Reading]


class Draw(NamedTuple):
    """Of all GPUs together over some time: watts, from their counters of joules; the mean SM clock in MHz; the share of
    the time in which anything ran on them."""

    watts: float
    mhz: float
    busy: float

    def emit(self, emit: Callable[[str, float, str], object], rate: float, unit: str = "request") -> None:
        """As figures of a load that did ``rate`` such units a second: ``emit`` takes (name, value, unit)."""
        emit("watts", round(self.watts, 1), "W")
        emit("mhz", round(self.mhz), "MHz")
        emit("joules", round(self.watts / rate, 2), f"J/{unit}")


class GpuPower:
    """Reads the GPUs ten times a second, on a thread of its own, while the context lasts.

    Args:
        gpus: as NVML numbers them (or UUIDs); none for no sampling. Where they cannot be read it says so on stderr, and
            samples nothing.
        interval_s: between two readings.
    """

    def __init__(self, gpus: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self.samples: list[Sample] = []
        self._meter: GpuMeter | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu power", daemon=True)
        try:
            self._meter = GpuMeter(gpus) if gpus else None
        except OSError as error:
            print(f"no watts: {error}", file=sys.stderr)

    def __enter__(self) -> GpuPower:
        if self._meter:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._meter:
            self._thread.join()

    def between(self, began: float, ended: float) -> Draw | None:
        """Over this time (time.perf_counter()); None where fewer than two samples lie in it."""
        within = [sample for sample in self.samples if began <= sample[0] <= ended]
        if len(within) < 2:
            return None
        (first, before), (last, after) = within[0], within[-1]
        readings = [reading for _, reading in within]
        return Draw(
            watts=(after.joules - before.joules) / (last - first),
            mhz=fmean(each.mhz for each in readings),
            busy=fmean(each.busy for each in readings),
        )

    def _run(self) -> None:
        assert self._meter is not None
        while not self._stop.wait(self._interval_s):
            try:
                self.samples.append((time.perf_counter(), Reading.of(self._meter)))
            except OSError:  # this time it did not tell
                continue
