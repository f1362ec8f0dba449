"""What GPUs draw and how fast they are clocked while a load runs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import NamedTuple

INTERVAL_S = 0.5
PATIENCE_S = 10.0


class Sample(NamedTuple):
    """At a moment of time.perf_counter(): watts of all the GPUs together, their mean SM clock in MHz."""

    moment: float
    watts: float
    mhz: float


class GpuPower:
    """Asks nvidia-smi twice a second, on a thread of its own, while the context lasts.

    Args:
        gpus: as nvidia-smi numbers them (or UUIDs); none for no sampling.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self.samples: list[Sample] = []
        self._gpus = ",".join(gpus)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu power", daemon=True)

    def __enter__(self) -> GpuPower:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._gpus:
            self._thread.join()

    def between(self, began: float, ended: float) -> tuple[float, float] | None:
        """(watts, MHz) in the mean over this time; None where nothing was sampled in it."""
        within = [sample for sample in self.samples if began <= sample.moment <= ended]
        if not within:
            return None
        return fmean(sample.watts for sample in within), fmean(sample.mhz for sample in within)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.samples.append(self._look())
            except FileNotFoundError:  # no driver here
                return
            except (OSError, subprocess.SubprocessError, ValueError):  # this time it did not tell
                continue

    def _look(self) -> Sample:
        query = ["nvidia-smi", f"--id={self._gpus}", "--query-gpu=power.draw,clocks.sm"]
        run = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
        watts, mhz = zip(*([float(cell) for cell in line.split(",")] for line in run.stdout.splitlines()))
        return Sample(time.perf_counter(), sum(watts), fmean(mhz))
