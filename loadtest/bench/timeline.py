"""What ran on a GPU and when, by torch's profiler: launches, the time in which a kernel runs, and a picture of some
milliseconds. Without a GPU the operators of the CPU stand for its kernels, and for their launches."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tessera_evaluation.charts import Chart

LAUNCH = re.compile("cu(da)?(LaunchKernel|GraphLaunch|Memcpy.*Async|Memset.*Async)")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
KINDS = {"attention": "#f28e2b", "product": "#4e79a7", "other": "#59a14f"}
NAMES = {
    "attention": re.compile("attention|attn|fmha|flash|sdpa|dot_product", re.IGNORECASE),
    "product": re.compile("gemm|gemv|nvjet|cutlass|linear|skinny|gate_up|mm", re.IGNORECASE),
}
WINDOW_MS = 50.0
WIDTH, LEFT, TOP, ROW, BAR = 1000, 20, 60, 64, 30  # pixels
GAP = 0.1
"""Pixels between kernels of a kind that are drawn as one."""


class Kernel(NamedTuple):
    """In milliseconds."""

    began: float
    ended: float
    kind: str


@dataclass(frozen=True)
class Trace:
    """``kernels`` in the order of their beginnings; ``launches``: calls of the host that put work on the GPU."""

    kernels: list[Kernel]
    launches: int

    @classmethod
    def of(cls, run: Callable[[], object]) -> Trace:
        """Of what runs, to its end."""
        on_gpu = torch.cuda.is_available()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            run()
            if on_gpu:
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(file))
            return cls.read(json.loads(file.read_text())["traceEvents"])

    @classmethod
    def read(cls, events: Iterable[Mapping[str, Any]]) -> Trace:
        """Of the profiler's events."""
        timed = [event for event in events if event.get("ph") == "X"]
        launches = [event for event in timed if LAUNCH.match(event["name"])]
        ran = [event for event in timed if event.get("cat") in ON_GPU]
        if not ran:
            ran = launches = [event for event in timed if event.get("cat") == "cpu_op"]
        kernels = sorted(
            Kernel(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, kind_of(event["name"])) for event in ran
        )
        return cls(kernels, len(launches))

    def window(self, ms: float = WINDOW_MS) -> Trace:
        """The kernels of the middle: their times count from its beginning, its ends cut what lies across them."""
        first, last = self.kernels[0].began, max(kernel.ended for kernel in self.kernels)
        begin = first + max(0.0, last - first - ms) / 2
        inside = (
            Kernel(max(0.0, kernel.began - begin), min(ms, kernel.ended - begin), kernel.kind)
            for kernel in self.kernels
        )
        return Trace([kernel for kernel in inside if kernel.began < kernel.ended], self.launches)

    @property
    def busy_ms(self) -> float:
        """In which any kernel runs."""
        busy, until = 0.0, float("-inf")
        for kernel in self.kernels:
            busy += max(0.0, kernel.ended - max(kernel.began, until))
            until = max(until, kernel.ended)
        return busy


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in NAMES.items() if pattern.search(name)), "other")


def picture(rows: Mapping[str, Trace], title: str, ms: float = WINDOW_MS) -> str:
    """The SVG of these windows, one below the other, under what each is called."""
    bottom = TOP + ROW * len(rows)
    chart = Chart((WIDTH, bottom + 40), (LEFT, WIDTH - LEFT, TOP, bottom), (0.0, ms), (0.0, 1.0))
    chart.text(LEFT, 22, title, size="14")
    for place, (kind, colour) in enumerate(KINDS.items()):
        chart.text(LEFT + 130 * place, 43, f"■ {kind}", fill=colour)
    chart.axes({at: f"{at:g} ms" for at in (ms * step / 5 for step in range(6))}, {}, "")
    for number, (name, trace) in enumerate(rows.items()):
        top = TOP + ROW * number
        chart.text(LEFT, top + 18, name)
        for kind, colour in KINDS.items():
            edges = [0.0, *(edge for x, width in bars(chart, trace, kind) for edge in (x, x + width))]
            dashes = " ".join(f"{10 * (after - before):.0f}" for before, after in pairwise([0.0, *edges]))
            chart.parts.append(
                f'<path d="M0 {top + ROW - 6 - BAR / 2:g}h{WIDTH}" pathLength="{10 * WIDTH}" stroke="{colour}" '
                f'stroke-width="{BAR}" stroke-dasharray="{dashes} {10 * WIDTH}"/>'
            )
    return chart.svg()


def bars(chart: Chart, trace: Trace, kind: str) -> list[tuple[float, float]]:
    """Where those of a kind begin, and how wide they are; what lies close together is one."""
    found: list[tuple[float, float]] = []
    for kernel in trace.kernels:
        if kernel.kind != kind:
            continue
        begin, end = round(chart.x(kernel.began), 1), chart.x(kernel.ended)
        if found and begin - sum(found[-1]) <= GAP:
            begin = found[-1][0]
            end = max(end, sum(found.pop()))
        found.append((begin, round(max(end - begin, GAP), 1)))
    return found
