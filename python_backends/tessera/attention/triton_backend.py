"""Our own kernels: rotate and store in one launch, split-K decoding, prefill over cached prefixes; and both in one
order, whose bits depend on nothing but what a query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.attention.backend import AttentionBackend, AttentionStep, HeadShape, KvStorage, LastQueries, SpanTable
from tessera.kernels.operands import AttentionPlan, DeferredProduct, EarlyProduct, HeadNorms
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.row_attention import PLAN, lane_programs, row_decode, row_prefill
from tessera.kernels.skinny_linear import multiprocessors
from tessera.kernels.transfer import to_device
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles, short_plan

# Contexts that the number of splits is chosen for where a CUDA graph cannot know them.
_USUAL_CONTEXT = 4096


class _Singles(NamedTuple):
    """Sequences of one query: context int64 [s], blocks int64 [most, s]; all of ``settled`` ones but the last position
    was there before the step."""

    context: torch.Tensor
    blocks: torch.Tensor
    splits: int
    settled: bool = False


class _Pieces(NamedTuple):
    """Pieces of prompts, as :func:`prefill_attention` takes them."""

    plan: AttentionPlan
    rows: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    blocks: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """Single queries come first in the batch, pieces after them; any may be missing."""

    singles: _Singles | None
    pieces: _Pieces | None


class StaticPieces:
    """Where a step's spans stand in memory that stays where it is: a CUDA graph may hold their plan.

    For each number of tokens the integers of a flat array are: the queries that tokens are chosen from, of
    ``most_rows`` at most; the tiles; the spans; and, a row of ``most_blocks`` each, the blocks of as many as there are.
    All are pieces, single queries too. One piece more is always empty: that of the tiles that are too many.
    """

    def __init__(self, backend: TritonBackend, most_sequences: int, most_rows: int, most_blocks: int) -> None:
        self._backend, self._plan = backend, backend.short_plan
        self._queries = backend.tile_queries(self._plan)
        self._most_sequences, self._most_rows, self._most_blocks = most_sequences, most_rows, most_blocks

    def size(self, tokens: int) -> int:
        """How many integers those of a step of this many tokens are, at most."""
        return sum(rows * columns for rows, columns in self._shapes(tokens))

    def plan(self, flat: torch.Tensor, tokens: int) -> _Plan:
        """The plan for all spans in ``flat`` int64, of this many tokens at most; rows of no span are not attended."""
        _, tiles, (rows, counts, contexts), blocks = self._parts(flat, tokens)
        return _Plan(None, _Pieces(self._plan, rows, counts, contexts, blocks.T, tiles.int()))

    def last(self, flat: torch.Tensor, tokens: int, most: int) -> tuple[torch.Tensor, _Plan]:
        """The queries that tokens are chosen from, up to ``most``: their rows, int64 [m], and the plan for them. Where
        there are fewer, the others are dummies with row 0."""
        queries, _, _, blocks = self._parts(flat, tokens)
        rows, contexts, pieces = queries[:, :most]
        return rows, self._backend.captured_plan(contexts, blocks.index_select(0, pieces).T)

    def fill(self, flat: np.ndarray, tokens: int, table: SpanTable, queries: LastQueries) -> int:
        """Writes a step's spans, and which of their queries tokens are chosen from, into ``flat`` int64, where this
        many tokens have room. Returns how many integers at its front are to change."""
        sequences, most = table.blocks.shape
        last, tiles, spans, blocks = self._parts(flat, tokens)
        for part in (last, tiles, spans):
            part[...] = 0
        last[:, : len(queries.row)] = queries
        tiles[:, 0] = self._empty(tokens)
        needed = prefill_tiles(table.count, table.context, self._queries)
        tiles[: len(needed)] = needed
        spans[:, :sequences] = table.row, table.count, table.context
        blocks[:sequences, :most], blocks[:sequences, most:] = table.blocks, 0
        return self.size(tokens) - (self._empty(tokens) + 1 - sequences) * self._most_blocks

    def _empty(self, tokens: int) -> int:
        return min(tokens, self._most_sequences)

    def _shapes(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Of last queries, tiles, spans and blocks. No step of this many tokens has more tiles."""
        sequences = self._empty(tokens)
        tiles = tokens // self._queries + sequences
        return (3, min(tokens, self._most_rows)), (tiles, 2), (3, sequences + 1), (sequences + 1, self._most_blocks)

    def _parts(self, flat: Any, tokens: int) -> list[Any]:
        """Views of an array or a tensor; of blocks the rows that it has."""
        parts, begin = [], 0
        for rows, columns in self._shapes(tokens):
            parts.append(flat[begin : begin + rows * columns].reshape(-1, columns))
            begin += rows * columns
        return parts


class TritonBackend(AttentionBackend):
    """The default on a GPU. Pieces of prompts read keys and values as they were stored, whether they begin a prompt or
    not; single queries have a kernel of their own."""

    _decode: Callable[..., torch.Tensor] = staticmethod(decode_attention)
    _prefill: Callable[..., torch.Tensor] = staticmethod(prefill_attention)

    def __init__(self, shape: HeadShape, storage: KvStorage) -> None:
        super().__init__(shape, storage)
        self.whole_plan, self.short_plan = self._prefill_plans()
        # Splits are for a GPU: interpreted, each takes its time.
        self._processors = multiprocessors(storage.device) if storage.device.type == "cuda" else 1

    def plan(self, table: SpanTable) -> _Plan:
        single = table.count == 1  # they come first
        return _Plan(
            self._singles(table, single) if single.any() else None,
            None if single.all() else self._pieces(table, ~single),
        )

    def captured_plan(self, context: torch.Tensor, blocks: torch.Tensor, settled: bool = False) -> _Plan:
        most = min(blocks.shape[0] * self.storage.block_size, _USUAL_CONTEXT)
        return _Plan(_Singles(context, blocks, self._splits(len(context), most), settled), None)

    def attend(
        self, layer: int, qkv: torch.Tensor | DeferredProduct, step: AttentionStep, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """Rotates the queries in ``qkv`` itself."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        rotated = rotate_and_store(qkv, step.cos, step.sin, step.slots, self.storage.layers[layer], heads, norms)
        q, k, v = rotated.view(rotated.shape[0], -1, self.shape.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if step.rows is not None:
            q = q[step.rows]
        return self._attend(layer, q, k, v, step.plan, isinstance(qkv, EarlyProduct)).flatten(1)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, early: bool = False
    ) -> torch.Tensor:
        """``early``: behind a product that fetched early, as fetching early pays where steps are that small."""
        cache = self.storage.layers[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        singles: _Singles | None = plan.singles
        pieces: _Pieces | None = plan.pieces
        if singles is not None:
            first = len(singles.context)
            given = q[:first], cache, singles.blocks, singles.context, self.scale, singles.splits, out[:first]
            if early and singles.settled:
                decode_attention(*given, settled=True)
            else:
                self._decode(*given)
        if pieces is not None:
            self._prefill(q, cache, *pieces[1:], self.scale, out, pieces.plan)
        return out

    def _singles(self, table: SpanTable, which: np.ndarray) -> _Singles:
        context = table.context[which]
        splits = self._splits(len(context), int(context.max()))
        return _Singles(self._tensor(context), self._tensor(self._blocks(table, which)), splits)

    def _pieces(self, table: SpanTable, which: np.ndarray) -> _Pieces:
        row, count, context = (column[which] for column in (table.row, table.count, table.context))
        tiles = prefill_tiles(count, context, self.tile_queries(self.whole_plan))
        given = row, count, context, self._blocks(table, which), tiles
        return _Pieces(self.whole_plan, *map(self._tensor, given))

    def _blocks(self, table: SpanTable, which: np.ndarray) -> np.ndarray:
        """Block numbers int64 [most, s]: the sequences' tables as columns, as the kernels want them."""
        most = -(-int(table.context[which].max()) // self.storage.block_size)
        return table.blocks[which, :most].T

    def tile_queries(self, plan: AttentionPlan) -> int:
        """How many queries a tile of this plan has, each with the heads of a group."""
        return plan.rows // (self.shape.heads // self.shape.kv_heads)

    def _prefill_plans(self) -> tuple[AttentionPlan, AttentionPlan]:
        """Of whole prompts, and of the steps that graphs hold, most of whose pieces are short where it matters."""
        of = self.shape.head_dim, self.storage.dtype
        return default_plan(*of), short_plan(*of)

    def _splits(self, sequences: int, most_tokens: int) -> int:
        """How many programs share a query's context."""
        return choose_splits(sequences, self.shape.kv_heads, most_tokens, self._processors)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.storage.device)


class FixedTritonBackend(TritonBackend):
    """Both of one kernel that goes through keys in one order."""

    _decode = staticmethod(row_decode)
    _prefill = staticmethod(row_prefill)

    def _prefill_plans(self) -> tuple[AttentionPlan, AttentionPlan]:
        return PLAN, PLAN

    def _splits(self, sequences: int, most_tokens: int) -> int:
        return lane_programs(sequences, self.shape.kv_heads, self._processors)
