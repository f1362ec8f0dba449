"""Token embeddings, the rows that pictures put in their place, and the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """``weight`` [vocabulary, hidden]."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty((vocab_size, size), dtype=dtype, device=device))

    def forward(
        self, ids: torch.Tensor, image_index: torch.Tensor | None, image_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """ids int64 [n] -> [n, hidden]; ``image_rows`` [r, hidden] replace the rows ``image_index`` [r]."""
        rows = F.embedding(ids, self.weight)  # type: ignore[arg-type]
        return rows if image_index is None or image_rows is None else rows.index_copy_(0, image_index, image_rows)
