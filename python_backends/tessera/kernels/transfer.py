"""Arrays to the device and back through pinned memory, and moments on its clock, without waiting unless asked."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import torch


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``values`` on ``device``, in the order of the current stream; on the CPU they share their memory."""
    return uploadable(values, device).to(device, non_blocking=True)


def load(target: torch.Tensor, values: np.ndarray) -> None:
    """Copies ``values`` into ``target``, of their shape and dtype, which stays where it is."""
    target.copy_(uploadable(values, target.device), non_blocking=True)


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
