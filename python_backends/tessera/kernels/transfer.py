"""Arrays to the device and back through pinned memory, and moments on its clock, without waiting unless asked."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import torch

_TWINS = 3  # a step is under way, and one is applied, while the next is put in


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``, in the order of the current stream; on the CPU they share their memory."""
    return uploadable(values, device).to(device, non_blocking=True)


class Staging:
    """Puts what changes from step to step into the front of ``target``, a flat tensor that stays where it is, out of
    pinned memory of its own: to ask for some, and give it back, takes as long as a small step's packing."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._twins = [target]
        self._copied: list[torch.cuda.Event] = []
        if target.is_cuda:
            self._twins = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=True) for _ in range(_TWINS)]
            self._copied = [torch.cuda.Event() for _ in self._twins]
        self._views = [twin.numpy() for twin in self._twins]
        self._turn = 0

    def front(self) -> np.ndarray:
        """What :meth:`send` copies, with whatever it held."""
        self._turn = (self._turn + 1) % len(self._twins)
        if self._copied:
            self._copied[self._turn].synchronize()  # of one never recorded at once
        return self._views[self._turn]

    def send(self, count: int) -> None:
        """Copies the first ``count`` of :meth:`front`, in the order of the current stream."""
        if self._copied:
            self._target[:count].copy_(self._twins[self._turn][:count], non_blocking=True)
            self._copied[self._turn].record(_stream(self._target.device))


def uploadable(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that ``device`` reads while the host goes on; torch keeps a pinned block until the copies are done."""
    source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return source.pin_memory() if device.type == "cuda" and not source.is_cuda else source


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; a GPU's is complete once an event recorded after this call has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.default_stream(device)  # asking takes torch several times what recording does


class Moment:
    """A point in a device's work: on a GPU when its default stream has come that far, on the CPU now. ``host_ns``: when
    the host was there, by time.perf_counter_ns()."""

    def __init__(self, device: torch.device) -> None:
        self.host_ns = time.perf_counter_ns()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> int:
        """Nanoseconds of the device from ``earlier``, of the same device; both must have passed."""
        if self._event is None or earlier._event is None:
            return self.host_ns - earlier.host_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)
