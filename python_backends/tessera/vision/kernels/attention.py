"""Attention of the vision towers: every token sees every token of its own tile.

torch's scaled_dot_product_attention, with torch's own choice of the kernel (on the CPU its flash kernel) or a given
one: which is the fastest depends on the GPU and the number of tiles; a tower measures it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# The kernels that torch has for GPUs, without the one that writes all scores to memory.
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend | None = None
) -> torch.Tensor:
    """Unmasked attention, scale 1/sqrt(head size).

    Each argument is [tiles, tokens, heads, head size] of one floating dtype (strides are free); the result is
    [tiles, tokens, heads * head size], contiguous. RuntimeError when the backend asked for cannot do it.
    """
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        rows = scaled_dot_product_attention(query, key, value)
    # The GPU's kernels give their rows in the order of the queries', so that this is a view.
    return rows.transpose(1, 2).flatten(2)
