"""Queries and keys turned by the place of their patch, in place and in one pass: a read and a write a value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_PAIRS = 16384  # of a patch


def turn_heads(qkv: torch.Tensor, turns: torch.Tensor) -> None:
    """qkv [patches, 3, heads, size], contiguous, of any floating dtype: its queries and keys become what
    :func:`tessera.vision.kernels.tower_kernels.turned` makes of them; turns float32 [2, patches, size / 2], contiguous.

    ValueError for other shapes, or over 16384 pairs a patch.
    """
    patches, parts, heads, size = qkv.shape
    if not (qkv.is_contiguous() and turns.is_contiguous()) or turns.shape != (2, patches, size // 2) or parts != 3:
        raise ValueError(f"turn_heads: contiguous qkv and turns of one number of patches, not {[*qkv.shape]}")
    pairs, half = triton.next_power_of_2(2 * heads), triton.next_power_of_2(size // 2)
    if pairs * half > _MAX_PAIRS:
        raise ValueError(f"turn_heads: at most {_MAX_PAIRS} pairs a patch, not {pairs} x {half}")
    if patches:
        # 16 pairs a thread: two loads of 16 bytes of either half in flight.
        warps = min(max(pairs * half // 512, 1), 16)
        _turn_heads[(patches,)](qkv, turns, patches, heads, size // 2, HEADS=pairs, HALF=half, num_warps=warps)


@triton.jit(do_not_specialize=["patches"])
def _turn_heads(qkv, turns, patches, heads, half: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One program a patch; its queries' heads and its keys' lie beside each other."""
    patch = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < 2 * heads) & (column < half)
    at = qkv + patch * (3 * heads * 2 * half) + head * (2 * half) + column
    cosine = tl.load(turns + patch * half + column, mask=column < half, other=0.0)
    sine = tl.load(turns + (patches + patch) * half + column, mask=column < half, other=0.0)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * cosine - second * sine).to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + half, (second * cosine + first * sine).to(qkv.dtype.element_ty), mask=inside)
