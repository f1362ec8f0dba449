"""The gated activation of the feed-forward part."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """[n, 2 * size], gate first -> silu(gate) * up [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
