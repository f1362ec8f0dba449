"""Which of several ways is the fastest on this machine: measured once, kept on disk, and printed.

Which implementation the layers use: the triton kernels on a GPU, their twins in torch elsewhere.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING

from tessera.settings.user_cache import cache_folder, source_digest, write_whole

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

Clock = Callable[[Callable[[], object]], float]


class MeasuredChoices:
    """Answers questions of speed; a question must name everything that its answer depends on.

    ``path``: a JSON file of question -> milliseconds of each way; one that cannot be read or written costs time and
    nothing else. ``clock`` takes a way and returns how many milliseconds it takes.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._known: dict[str, dict[str, float]] = _read(path)

    def fastest(self, question: str, ways: Mapping[str, Callable[[], object]], margin: float = 0.0) -> str:
        """The name of the fastest way; of those that take at most ``margin`` (a share) longer, the first one."""
        times = self._known.get(question)
        if times is None or set(times) != set(ways):
            times = {name: self._time(question, name, way) for name, way in ways.items()}
            if all(map(math.isfinite, times.values())):  # what failed may have failed for once
                self._known[question] = times
                self._write()
        best = next(name for name in ways if times[name] <= (1 + margin) * min(times.values()))
        listed = ", ".join(f"{name} {milliseconds:.4f} ms" for name, milliseconds in times.items())
        _LOG.info("%s: %s -> %s", question, listed, best)
        return best

    def _time(self, question: str, name: str, way: Callable[[], object]) -> float:
        try:
            return self._clock(way)
        except Exception as error:  # a library that cannot do it is no reason to fail: there are other ways
            _LOG.warning("%s: %s cannot run here: %s", question, name, error)
            return float("inf")

    def _write(self) -> None:
        """What others wrote meanwhile stays."""
        self._known = _read(self._path) | self._known
        try:
            text = json.dumps(self._known, indent=1, sort_keys=True)
            write_whole(self._path, lambda draft: draft.write_text(text))
        except OSError as error:
            _LOG.warning("measured choices are not kept: %s", error)


def choices_path() -> Path:
    """Where this user's choices are kept."""
    return cache_folder() / "choices.json"


def machine_of(device: torch.device) -> str:
    """What every question's answer depends on: the GPU, torch, and our code."""
    import torch

    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, kernels {kernels_version()}"


@cache
def kernels_version() -> str:
    """Eight digits that change with the text of our kernels, and of how they are measured."""
    package = Path(__file__).parents[1]
    return source_digest(*(package / folder for folder in ("kernels", "linear", "models")))[:8]


def graph_milliseconds(way: Callable[[], object]) -> float:
    """A clock for GPUs: the median time of one run in a CUDA graph, without the host's launches."""
    import torch

    way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads(path.read_text())
        return {question: {name: float(ms) for name, ms in times.items()} for question, times in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


@cache
def layer_kernels(device_type: str) -> ModuleType:
    """`fast.py` for "cuda", `reference.py` for any other type of device; imports triton for the former alone."""
    return import_module(f"tessera.kernels.{'fast' if device_type == 'cuda' else 'reference'}")
