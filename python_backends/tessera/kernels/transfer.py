"""Arrays to the device and back through pinned memory, and moments on its clock: nobody waits unasked.

From the host to the device without waiting for it.
"""

from __future__ import annotations

import time

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of ``array`` on ``device``; on the CPU it shares the array's memory."""
    return _source(array, device).to(device, non_blocking=True)


def load(target: torch.Tensor, array: np.ndarray) -> None:
    """Copies ``array`` into ``target``, of its shape and dtype, which stays where it is."""
    target.copy_(_source(array, target.device), non_blocking=True)


def _source(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` where ``device`` reads it while the host goes on."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # torch keeps a pinned block alive until the copies out of it are done.
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; a GPU's is complete once an event recorded after this call has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Moment:
    """A point in a device's work: on a GPU when its stream has come that far, on the CPU now."""

    def __init__(self, device: torch.device) -> None:
        self._host_ns = time.perf_counter_ns()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> int:
        """Nanoseconds of the device from ``earlier``, of the same device; both must have passed."""
        if self._event is None or earlier._event is None:
            return self._host_ns - earlier._host_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def uploadable(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that a GPU can fetch by itself; torch keeps a pinned block until the copies out of it are done."""
    source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return source.pin_memory() if device.type == "cuda" and not source.is_cuda else source


def uploaded(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on the device, there in the order of the current stream."""
    return uploadable(values, device).to(device, non_blocking=True)
