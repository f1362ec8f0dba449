"""Picture rows between the stages: EMBEDDINGS is bfloat16; float32 rows keep their bits, a number as two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, hidden] of any float dtype -> bfloat16 [n, hidden], or [n, 2 * hidden] with the bits of float32 ones."""
    import torch  # which not every stage has

    if rows.dtype == torch.float32:
        return rows.contiguous().view(torch.bfloat16)
    return rows.to(torch.bfloat16).contiguous()


def unpacked(rows: torch.Tensor, hidden: int) -> torch.Tensor:
    """What :func:`packed` made -> rows [n, hidden], bfloat16 or float32; shares its memory."""
    import torch

    return rows.view(torch.float32) if rows.shape[-1] == 2 * hidden else rows
