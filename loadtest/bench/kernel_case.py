"""A kernel at a shape, timed and compared on a GPU: what the benchmark `kernels` is made of."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

CUDA = torch.device("cuda")
ROTATED = 256 << 20  # bytes of weights that take turns

Call = Callable[..., Any]


def in_turns(ways: Mapping[str, list[Call]], stream: torch.cuda.Stream) -> dict[str, float]:
    """Median seconds of one of each way's calls, which run one after the other in a CUDA graph; the graphs take turns,
    so that what the clocks do meanwhile falls on all of them."""
    torch.cuda.synchronize()  # the operands were made on another stream
    graphs = {}
    with torch.cuda.stream(stream):
        for way, calls in ways.items():
            calls[0]()  # compiled before the capture
            stream.synchronize()
            graphs[way] = torch.cuda.CUDAGraph()
            graphs[way].capture_begin()
            for call in calls:
                call()
            graphs[way].capture_end()
            graphs[way].replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(9 * len(graphs) + 1)]
        marks[0].record()
        for mark, graph in zip(marks[1:], 9 * [*graphs.values()]):
            graph.replay()
            mark.record()
        stream.synchronize()
    taken = [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
    return {way: statistics.median(taken[place :: len(graphs)]) / len(ways[way]) for place, way in enumerate(graphs)}


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds not-a-numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in norm; not-a-number where a result is one."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=CUDA)


def machine_speeds(stream: torch.cuda.Stream) -> tuple[float, float]:
    """GB/s of a copy, both directions counted, and TFLOP/s of a bf16 product of two 8,192-square matrices."""
    source = normal(1 << 30)
    target, a, b = torch.empty_like(source), normal(8192, 8192), normal(8192, 8192)
    ways = {"copy": [lambda: torch.neg(source, out=target)] * 3, "product": [lambda: torch.mm(a, b)] * 4}
    taken = in_turns(ways, stream)
    return 2 * source.nbytes / taken["copy"] / 1e9, 2 * 8192**3 / taken["product"] / 1e12


@dataclass(frozen=True)
class Case:
    """A kernel at a shape. ``ways``: calls by name, ``ours`` among them; ``bytes``: the least that a call moves;
    ``flop``: what it has to compute, where that is what takes the time."""

    kernel: str
    shape: str
    rows: int
    ways: Mapping[str, list[Call]]
    bytes: int
    error: float
    flop: int = 0

    def measure(self, stream: torch.cuda.Stream) -> dict[str, Any]:
        taken = in_turns(self.ways, stream)
        row = {"kernel": self.kernel, "shape": self.shape, "rows": self.rows}
        row |= {f"{way}_us": 1e6 * seconds for way, seconds in taken.items()}
        rate = {"tflop_s": self.flop / 1e12} if self.flop else {"gb_s": self.bytes / 1e9}
        return row | {name: each / taken["ours"] for name, each in rate.items()} | {"error": self.error}


def copies(each_bytes: int) -> range:
    """Of operands, as many as no cache holds."""
    return range(max(4, -(-ROTATED // each_bytes)))
