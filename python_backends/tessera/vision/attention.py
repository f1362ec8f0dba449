"""Attention of the vision towers: every token sees every token of its own tile.

One function, so that the choice of the kernel stays in one place. torch's scaled_dot_product_attention is the
choice on the CPU (its flash kernel) and the portable one elsewhere.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Unmasked attention, scale 1/sqrt(head size).

    Each argument is [tiles, tokens, heads, head size] of one floating dtype (strides are free); the result is
    [tiles, tokens, heads * head size], contiguous.
    """
    rows = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return rows.transpose(1, 2).flatten(2)
