"""Recording the same work for several sizes as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

_LOG = logging.getLogger(__name__)


def record(
    what: str,
    sizes: Iterable[int],
    prepare: Callable[[int], None],
    run: Callable[[int], None],
    device: torch.device,
    urgent_up_to: int = 0,
) -> dict[int, Callable[[], None]]:
    """For each size, what repeats ``run(size)``: a graph's replay, on the CPU ``run`` itself.

    ``prepare(size)`` is called once before; it fills the static inputs with dummies. ``what``, for the log: "decode
    graphs", and so on. The largest is recorded first, so that the smaller ones live in its memory. Kernels of sizes up
    to ``urgent_up_to`` start before all others that wait for a multiprocessor, of other processes too under MPS; these
    graphs have memory of their own.
    """
    replays: dict[int, Callable[[], None]] = {}
    started, before = time.perf_counter(), _reserved(device)
    pool = None
    ahead = torch.cuda.Stream(device, priority=-1) if urgent_up_to and device.type == "cuda" else None
    for size in sorted(sizes, reverse=True):
        prepare(size)
        run(size)  # compiles kernels and makes workspaces, which must not happen while recording
        if device.type == "cpu":
            replays[size] = partial(run, size)
            continue
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=ahead if size <= urgent_up_to else None):
            run(size)
        pool = graph.pool()
        replays[size] = graph.replay
    spent, kept = time.perf_counter() - started, (_reserved(device) - before) / 2**20
    _LOG.info("%s: %d sizes up to %d in %.1f s, %.0f MiB", what, len(replays), max(replays), spent, kept)
    return replays


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
