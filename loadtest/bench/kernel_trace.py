"""What a GPU did, from a torch.profiler's trace: how much of the time a kernel ran, which ones, and what it waited for.

Profile with ``torch.profiler.profile(activities=[ProfilerActivity.CUDA])``: kernels launched by any thread are seen,
those inside CUDA graphs too.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.profiler import profile

WIDTH = 90  # characters of a kernel's name that are shown


class Kernel(NamedTuple):
    """One run of a kernel; times in seconds on the trace's clock."""

    name: str
    start: float
    end: float


class Gap(NamedTuple):
    """A time without a kernel, in seconds, and the kernels before and after it."""

    seconds: float
    before: str
    after: str


class Trace:
    """Kernels in order of their start, cut to the window that is judged.

    Args:
        kernels: in any order.
        trim: seconds left out at both ends, where the profiler itself begins and ends.

    Raises ValueError when nothing is left to judge.
    """

    def __init__(self, kernels: Iterable[Kernel], trim: float = 0.0) -> None:
        everything = sorted(kernels, key=lambda kernel: kernel.start)
        if not everything:
            raise ValueError("the trace holds no kernel; is this a GPU's?")
        self.start = everything[0].start + trim
        self.end = max(kernel.end for kernel in everything) - trim
        self.kernels = [
            Kernel(kernel.name, max(kernel.start, self.start), min(kernel.end, self.end))
            for kernel in everything
            if kernel.end > self.start and kernel.start < self.end
        ]
        if not self.kernels:
            raise ValueError(f"the trace is shorter than the {2 * trim:g} s left out of it")

    @classmethod
    def of_profile(cls, finished: profile, trim: float) -> Trace:
        """From a profile that was stopped."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            finished.export_chrome_trace(str(path))
            return cls(read_kernels(json.loads(path.read_text())), trim)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def busy(self) -> float:
        """Share of the window in which at least one kernel ran."""
        return 1.0 - sum(gap.seconds for gap in self.gaps()) / self.seconds

    def gaps(self) -> list[Gap]:
        """All times without a kernel, longest first."""
        gaps = []
        reached, before = self.start, "(begin)"
        for kernel in self.kernels:
            if kernel.start > reached:
                gaps.append(Gap(kernel.start - reached, before, kernel.name))
            if kernel.end > reached:
                reached, before = kernel.end, kernel.name
        if self.end > reached:
            gaps.append(Gap(self.end - reached, before, "(end)"))
        return sorted(gaps, key=lambda gap: gap.seconds, reverse=True)

    def totals(self) -> list[tuple[str, int, float]]:
        """(name, runs, seconds) of each kernel, most seconds first."""
        times: defaultdict[str, list[float]] = defaultdict(list)
        for kernel in self.kernels:
            times[kernel.name].append(kernel.end - kernel.start)
        rows = [(name, len(each), sum(each)) for name, each in times.items()]
        return sorted(rows, key=lambda row: row[2], reverse=True)

    def report(self, kernels: int = 12, gaps: int = 8) -> str:
        """The busy share, the kernels that took longest and the longest gaps, as text."""
        lines = [f"a kernel ran in {self.busy:.2%} of {self.seconds:.3f} s ({len(self.kernels)} runs)", ""]
        lines.append(f"{'kernel':{WIDTH}} {'runs':>7} {'ms':>9} {'us each':>9} {'of time':>8}")
        for name, runs, seconds in self.totals()[:kernels]:
            numbers = f"{runs:7} {seconds * 1e3:9.2f} {seconds / runs * 1e6:9.1f} {seconds / self.seconds:8.2%}"
            lines.append(f"{name[:WIDTH]:{WIDTH}} {numbers}")
        found = self.gaps()
        total = sum(gap.seconds for gap in found)
        lines += ["", f"{len(found)} gaps of {total * 1e3:.2f} ms in all; the longest:"]
        lines += [f"{gap.seconds * 1e6:9.1f} us  {gap.before[:WIDTH]}  ->  {gap.after[:WIDTH]}" for gap in found[:gaps]]
        return "\n".join(lines) + "\n"


def read_kernels(trace: dict) -> list[Kernel]:
    """The kernels of a chrome trace as torch.profiler exports it; copies and the host's events are passed over."""
    return [
        Kernel(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") == "kernel"
    ]
