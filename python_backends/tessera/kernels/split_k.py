"""The partials of a product whose k was shared out among programs, added up by a kernel of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessera.kernels.fp8 import early_launch, wait_for_previous

_FEW_ROWS = 64


def add_partials(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """parts [splits, m, n] contiguous, bias [n] -> their sum plus bias [m, n] of ``dtype``."""
    splits, m, n = parts.shape
    out = torch.empty((m, n), dtype=dtype, device=parts.device)
    block, warps = (256, 2) if m <= _FEW_ROWS else (1024, 4)
    _add_partials[(triton.cdiv(m * n, block),)](
        parts, bias, out, m * n, n, SPLITS=splits, BLOCK=block, num_warps=warps, **early_launch(parts.device)
    )
    return out


@triton.jit
def _add_partials(
    partials, bias, out, size, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """partials [SPLITS, size] -> out [size] of rows of n, always in the order of the splits, summed in float32."""
    wait_for_previous(EARLY)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(partials + at, mask=inside).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * size + at, mask=inside).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + at % n, mask=inside).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
