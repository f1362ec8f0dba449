"""torch's scaled_dot_product_attention over gathered blocks: one call for all single queries, one a prompt piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tessera.attention.backend import AttentionBackend, SpanTable, slots_of
from tessera.kernels.transfer import to_device


@dataclass(frozen=True)
class _Piece:
    """Packed rows of one prompt piece; its context's slots and ``mask`` are None where it starts its sequence."""

    rows: slice
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Packed rows of the s queries that stand alone, their slots [s * length] and mask [s, 1, 1, length]; pieces."""

    singles: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    pieces: list[_Piece]


class SdpaBackend(AttentionBackend):
    """The default on the CPU. A group of query heads shares its key head as several queries of one head."""

    def plan(self, table: SpanTable) -> _Plan:
        table = _joined(table)
        alone, size = table.count == 1, self.storage.block_size
        context = table.context[alone, None]
        # Behind a context the last position is read again, and masked: what lies there may be NaN.
        positions = np.arange(context.max(initial=0))[None]
        seen = np.minimum(positions, context - 1)
        slots = slots_of(table.blocks[alone], seen, size)
        columns = (table.row, table.count, table.context, table.blocks)
        pieces = [self._piece(*line) for line in zip(*(column[~alone] for column in columns))]
        bias = self._bias(positions >= context)[:, None, None]
        first = alone[: len(context)].all()  # as mostly
        singles = slice(len(context)) if first else to_device(table.row[alone], self.storage.device)
        return _Plan(singles, to_device(slots.reshape(-1), self.storage.device), bias, pieces)

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(plan.mask):
            out[plan.singles] = self._attend_singles(layer, q[plan.singles], plan)
        for piece in plan.pieces:
            out[piece.rows] = self._attend_piece(layer, q[piece.rows], k, v, piece)
        return out

    def _attend_singles(self, layer: int, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        kv_heads, head_dim = self.shape.kv_heads, self.shape.head_dim
        shape = (len(q), -1, kv_heads, head_dim)
        keys, values = (part.view(shape).transpose(1, 2) for part in self.storage.read(layer, plan.slots))
        grouped = q.view(len(q), kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, plan.mask, scale=self.scale)
        return attended.reshape(q.shape)

    def _attend_piece(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: _Piece
    ) -> torch.Tensor:
        if piece.slots is None:
            keys, values = k[piece.rows], v[piece.rows]
        else:
            keys, values = self.storage.read(layer, piece.slots)
        q, keys, values = (part.transpose(0, 1)[None] for part in (q, keys, values))
        causal = piece.mask is None
        attended = F.scaled_dot_product_attention(
            q, keys, values, piece.mask, is_causal=causal, scale=self.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    def _piece(self, row: int, count: int, context: int, blocks: np.ndarray) -> _Piece:
        rows = slice(int(row), int(row + count))
        if count == context:
            return _Piece(rows, None, None)
        positions = np.arange(context)
        unseen = positions[None] > positions[-count:, None]
        slots = slots_of(blocks, positions, self.storage.block_size)
        return _Piece(rows, to_device(slots, self.storage.device), self._bias(unseen))

    def _bias(self, unseen: np.ndarray) -> torch.Tensor:
        """0 where a query may look, -inf elsewhere, in the model's dtype."""
        bias = torch.zeros(unseen.shape, dtype=self.storage.dtype, device=self.storage.device)
        return bias.masked_fill_(to_device(unseen, bias.device), float("-inf"))


def _joined(table: SpanTable) -> SpanTable:
    """With queries of one sequence that follow each other as one span, which reads what they see but once."""
    if len(table.row) < 2:
        return table
    begins = table.context - table.count
    same = (table.blocks[1:] == table.blocks[:-1]).all(1) & (table.row[1:] == table.row[:-1] + table.count[:-1])
    first = np.flatnonzero(np.append(True, ~(same & (begins[1:] == table.context[:-1]))))
    if len(first) == len(table.row):
        return table
    last = np.append(first[1:], len(table.row)) - 1
    return SpanTable(table.row[first], np.add.reduceat(table.count, first), table.context[last], table.blocks[first])
