"""torch's scaled_dot_product_attention over gathered blocks: one call for sequences of about one length, one a prompt
piece.

The same one call for each few positions of a sequence, whose bits depend on nothing but what they see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tessera.attention.backend import AttentionBackend, KvStorage, SpanTable, slots_of
from tessera.kernels.transfer import to_device

_FEW = 16  # queries of a sequence
_TOGETHER = 8  # positions


@dataclass(frozen=True)
class _Piece:
    """Packed rows of one prompt piece; its context's slots and ``mask`` are None where it starts its sequence."""

    rows: slice
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Group:
    """Sequences with few queries, s of them, whose last query and last position fill them up to equal lengths.

    ``rows`` int64 [s, queries]: packed ones; ``slots`` [s * length]; ``mask`` [s, 1, queries * group, length] for the
    heads that share a key head, None where all is seen; ``kept``: which of the s * queries fill nothing up, and
    ``places``, where these stand in the packed rows.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | slice
    places: torch.Tensor


class SdpaBackend(AttentionBackend):
    """The default on the CPU. A group of query heads shares its key head as several queries of one head."""

    def plan(self, table: SpanTable) -> list[_Group | _Piece]:
        table = _joined(table)
        few = (table.count < table.context) & (table.count <= _FEW)
        pieces = [self._piece(*line) for line in zip(*(column[~few] for column in table.columns))]
        # Within a power of two: a page's layout, say, is read beside short blocks.
        alike = np.frexp(table.count)[1] * 64 + np.frexp(table.context)[1]
        groups = [self._group(*(column[few & (alike == kind)] for column in table.columns)) for kind in {*alike[few]}]
        return [*groups, *pieces]

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in plan:
            if isinstance(part, _Group):
                out.index_copy_(0, part.places, self._attend_group(layer, q, part))
            else:
                out[part.rows] = self._attend_piece(layer, q[part.rows], k, v, part)
        return out

    def _attend_group(self, layer: int, q: torch.Tensor, group: _Group) -> torch.Tensor:
        (count, queries), (kv_heads, head_dim) = group.rows.shape, (self.shape.kv_heads, self.shape.head_dim)
        keys, values = (
            part.view(count, -1, kv_heads, head_dim).transpose(1, 2) for part in self.storage.read(layer, group.slots)
        )
        grouped = q.index_select(0, group.rows.view(-1)).view(count, queries, kv_heads, -1, head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, group.mask, scale=self.scale)
        rows = attended.view(grouped.shape).transpose(1, 2).reshape(-1, *q.shape[1:])
        return rows[group.kept]

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

    def _group(self, row: np.ndarray, count: np.ndarray, context: np.ndarray, blocks: np.ndarray) -> _Group:
        device, place = self.storage.device, np.arange(count.max())
        query, positions = np.minimum(place, count[:, None] - 1), np.arange(context.max())
        # Behind a context the last position is read again, and masked: what lies there may be NaN.
        slots = slots_of(blocks, np.minimum(positions, context[:, None] - 1), self.storage.block_size)
        unseen = positions > ((context - count)[:, None] + query)[:, :, None]
        mask, real = None, (place < count[:, None]).reshape(-1)
        if unseen.any():
            mask = _bias(unseen, self.storage)[:, None].repeat_interleave(self.shape.heads // self.shape.kv_heads, 2)
        rows = to_device(row[:, None] + query, device)
        kept = slice(None) if real.all() else to_device(real.nonzero()[0], device)
        return _Group(rows, to_device(slots.reshape(-1), device), mask, kept, rows.view(-1)[kept])

    def _piece(self, row: int, count: int, context: int, blocks: np.ndarray) -> _Piece:
        rows = slice(int(row), int(row + count))
        if count == context:
            return _Piece(rows, None, None)
        positions = np.arange(context)
        unseen = positions[None] > positions[-count:, None]
        slots = slots_of(blocks, positions, self.storage.block_size)
        return _Piece(rows, to_device(slots, self.storage.device), _bias(unseen, self.storage))


@dataclass(frozen=True)
class _Span:
    """Queries of one sequence, packed ``rows``, by _TOGETHER as their positions have it: ``places``, where they stand
    among these; ``ends``: how many positions each few see, of which ``slots`` int64 has those of the last; ``mask``:
    [queries * group, longest end], the last of whose columns count."""

    rows: slice
    places: slice
    ends: range
    slots: torch.Tensor
    mask: torch.Tensor


class FixedBackend(AttentionBackend):
    """Every call has the queries of _TOGETHER positions, the first a multiple of it, and all keys up to the last one's,
    whether these queries are wanted or not: so a query's call always has the same shapes, and the query its row."""

    def plan(self, table: SpanTable) -> list[_Span]:
        return [self._span(*line) for line in zip(*_joined(table).columns)]

    def _span(self, row: int, count: int, context: int, blocks: np.ndarray) -> _Span:
        begin = context - count
        first = begin - begin % _TOGETHER
        ends = range(first + _TOGETHER, context + _TOGETHER, _TOGETHER)
        # Behind a context the last position is read again, and masked: what lies there may be NaN.
        slots = slots_of(blocks, np.arange(ends[-1]).clip(max=context - 1), self.storage.block_size)
        behind = np.arange(ends[-1]) - (ends[-1] - _TOGETHER)
        query = np.arange(_TOGETHER).repeat(self.shape.heads // self.shape.kv_heads)
        mask = _bias(behind > query[:, None], self.storage)
        places = slice(int(begin - first), int(context - first))
        return _Span(slice(int(row), int(row + count)), places, ends, to_device(slots, self.storage.device), mask)

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        out, (kv_heads, head_dim) = torch.empty_like(q), (self.shape.kv_heads, self.shape.head_dim)
        for span in plan:
            keys, values = (part.transpose(0, 1)[None] for part in self.storage.read(layer, span.slots))
            queries = q.new_zeros((len(span.ends), _TOGETHER, *q.shape[1:]))
            queries.flatten(0, 1)[span.places] = q[span.rows]
            grouped = queries.view(len(queries), _TOGETHER, kv_heads, -1, head_dim).transpose(1, 2)
            calls = [
                F.scaled_dot_product_attention(
                    few, keys[:, :, :end], values[:, :, :end], span.mask[:, -end:], scale=self.scale
                )
                for few, end in zip(grouped.flatten(2, 3)[:, None], span.ends)
            ]
            attended = torch.cat(calls).view(grouped.shape).transpose(1, 2)
            out[span.rows] = attended.reshape(-1, *q.shape[1:])[span.places]
        return out


def _bias(unseen: np.ndarray, storage: KvStorage) -> torch.Tensor:
    """0 where a query may look, -inf elsewhere, in the model's dtype."""
    bias = torch.zeros(unseen.shape, dtype=storage.dtype, device=storage.device)
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
