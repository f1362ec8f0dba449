"""Eight 4-bit values in an int32."""

from __future__ import annotations

import torch


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 8 * n]; a word's lowest bits come first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)
