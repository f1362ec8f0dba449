"""Prefill attention over packed pieces against the oracle backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_fakes import PagedBatch, close, shape_of

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.operands import PagedCache
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = AttentionPlan(rows=16, tokens=16, warps=4, stages=2)
# (count, context): around the edges of blocks and tiles, single queries, cached prefixes of any length.
PIECES = [(5, 5), (1, 1), (1, 40), (20, 20), (33, 97), (16, 32), (17, 65), (64, 64), (3, 131)]


def batch_of(pieces, dtype, device, generator, group=7, index=torch.int32, fp8=False, **shape):
    counts, contexts = zip(*pieces)
    return PagedBatch(shape_of(group, **shape), counts, contexts, dtype, device, generator, index, fp8)


def attended(batch, plan=None, out=None):
    cut = plan or default_plan(batch.shape.head_dim, batch.q.dtype)
    queries = cut.rows // (batch.shape.heads // batch.shape.kv_heads)
    tiles = torch.from_numpy(prefill_tiles(batch.counts, batch.contexts, queries)).to(batch.q.device)
    return prefill_attention(
        batch.q,
        batch.cache,
        batch.rows,
        batch.count,
        batch.context,
        batch.blocks,
        tiles,
        batch.scale,
        torch.empty_like(batch.q, memory_format=torch.contiguous_format) if out is None else out,
        plan,
    )


@pytest.mark.parametrize("group", [1, 2, 7])
def test_pieces_of_every_kind(dtype, device, generator, group):
    batch = batch_of(PIECES, dtype, device, generator, group)
    close(attended(batch), batch.expected())


@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_cache_in_fp8(dtype, device, generator, head_dim):
    batch = batch_of(PIECES, dtype, device, generator, fp8=True, head_dim=head_dim)
    close(attended(batch), batch.expected())


@pytest.mark.parametrize(
    "plan", [SMALL, AttentionPlan(rows=32, tokens=64, warps=4, stages=3), AttentionPlan(64, 32, 4, 2)]
)
def test_any_plan(half, device, generator, plan):
    batch = batch_of(PIECES[:7], half, device, generator, kv_heads=1)
    close(attended(batch, plan), batch.expected())


@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (3, 16), (1, 96), (7, 48)])
def test_other_heads(half, device, generator, group, head_dim):
    batch = batch_of([(40, 40), (3, 33)], half, device, generator, group, kv_heads=1, head_dim=head_dim)
    close(attended(batch), batch.expected())


def test_many_pieces_of_one_query(half, device, generator):
    batch = batch_of([(1, context) for context in range(1, 40, 2)], half, device, generator, kv_heads=1, head_dim=16)
    close(attended(batch), batch.expected())


def test_wide_indices_and_a_wider_table(half, device, generator):
    batch = batch_of([(20, 50), (9, 9)], half, device, generator, index=torch.int64)
    static = torch.zeros((9, 8), dtype=torch.int64, device=device)
    static[: len(batch.blocks), :2] = batch.blocks
    batch.blocks = static[:, :2]
    close(attended(batch), batch.expected())


def test_rows_of_no_piece_stay_as_they_are(half, device, generator):
    """The pieces may leave out rows, those of single queries say, and come in any order."""
    batch = batch_of([(4, 4), (6, 30), (5, 21)], half, device, generator)
    expected = batch.expected()
    expected[4:10] = 7
    for name in ("rows", "count", "context"):
        setattr(batch, name, getattr(batch, name)[[2, 0]])
    batch.blocks = batch.blocks[:, [2, 0]]
    batch.counts, batch.contexts = batch.counts[[2, 0]], batch.contexts[[2, 0]]
    wide = torch.full((15, batch.shape.heads + 1, 64), 7.0, dtype=half, device=device)
    out = wide[:, :-1]
    assert attended(batch, SMALL, out) is out
    close(out, expected)
    assert (wide[:, -1] == 7).all()


def test_no_pieces(half, device, generator):
    batch = batch_of([(4, 4)], half, device, generator)
    batch.counts, batch.contexts = batch.counts[:0], batch.contexts[:0]
    out = torch.full_like(batch.q, 7)
    assert (attended(batch, out=out) == 7).all()


def test_scores_beyond_what_exp_can_hold(device, generator):
    batch = batch_of([(20, 50)], torch.float32, device, generator)
    batch.q *= 1e3
    close(attended(batch), batch.expected(), tolerance=5e-3)  # the scores themselves round at 1e-3


@pytest.mark.parametrize("queries", [1, 4, 18])
def test_tiles_hold_every_query_once_and_the_longest_first(queries):
    counts, contexts = np.array(PIECES).T
    tiles = prefill_tiles(counts, contexts, queries)
    held = [(piece, query) for piece, first in tiles for query in range(first, min(first + queries, counts[piece]))]
    assert sorted(held) == [(piece, query) for piece, count in enumerate(counts) for query in range(count)]
    seen = [contexts[piece] - counts[piece] + first for piece, first in tiles]
    assert seen == sorted(seen, reverse=True)
    assert tiles.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(keys=torch.zeros(4, 24, 2, 64)), "block_size 24"),
        (dict(out=torch.zeros(2, 14, 64).half()), "one dtype"),
        (dict(tiles=torch.zeros(2, 3, dtype=torch.int32).T), "tiles"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        q=torch.zeros(2, 14, 64),
        keys=torch.zeros(4, 16, 2, 64),
        blocks=torch.zeros(1, 1, dtype=torch.int32),
        tiles=torch.zeros(1, 2, dtype=torch.int32),
        scale=1.0,
        out=torch.zeros(2, 14, 64),
    )
    arguments |= dict.fromkeys(("rows", "counts", "contexts"), torch.ones(1, dtype=torch.int32)) | change
    keys = arguments.pop("keys")
    with pytest.raises(ValueError, match=message):
        prefill_attention(cache=PagedCache(keys, keys), **arguments)
