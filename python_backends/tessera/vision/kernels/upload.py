"""From the host to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch


def uploadable(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that a GPU can fetch by itself; torch keeps a pinned block until the copies out of it are done."""
    source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return source.pin_memory() if device.type == "cuda" and not source.is_cuda else source


def uploaded(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on the device, there in the order of the current stream."""
    return uploadable(values, device).to(device, non_blocking=True)
