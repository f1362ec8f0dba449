"""The readable oracle: a loop over sequences, softmax written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tessera.engine.attention.backend import AttentionBackend, SpanTable, slots_of


class TorchBackend(AttentionBackend):
    """Slow and plain; every other backend is tested against it."""

    def plan(self, table: SpanTable) -> SpanTable:
        return table

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out = torch.empty_like(q)
        for row, count, context, blocks in zip(plan.row, plan.count, plan.context, plan.blocks):
            slots = slots_of(blocks, np.arange(context), self.storage.block_size)
            keys, values = self.storage.read(layer, torch.from_numpy(slots).to(q.device))
            out[row : row + count] = self._attend_one(q[row : row + count], keys.float(), values.float())
        return out

    def _attend_one(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = self.shape.heads // self.shape.kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.scale
        query_positions = torch.arange(len(keys) - len(q), len(keys), device=q.device)
        unseen = torch.arange(len(keys), device=q.device)[None] > query_positions[:, None]
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
