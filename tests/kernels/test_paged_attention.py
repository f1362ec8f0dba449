"""Attention over paged keys and values, of single queries and of pieces of prompts, against the oracle backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from paged_fakes import BLOCK, PagedBatch, close, shape_of

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.operands import PagedCache
from tessera.kernels.paged_decode import DEFAULT_PLAN, choose_splits, decode_attention
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = AttentionPlan(rows=16, tokens=16, warps=4, stages=2)
# (count, context): around the edges of blocks and tiles, single queries, cached prefixes of any length.
PIECES = [(5, 5), (1, 1), (1, 40), (20, 20), (33, 97), (16, 32), (17, 65), (64, 64), (3, 131)]
# Around the edges of blocks and of tiles of 64, and nothing at all.
CONTEXTS = [1, 15, 0, 16, 17, 63, 64, 65, 200]
SINGLES = [(1, context) for context in CONTEXTS]


def batch_of(pieces, dtype, device, generator, group=7, index=torch.int32, fp8=False, **shape):
    counts, contexts = zip(*pieces)
    return PagedBatch(shape_of(group, **shape), counts, contexts, dtype, device, generator, index, fp8)


def decoded(batch, splits=2, out=None, plan=DEFAULT_PLAN):
    return decode_attention(batch.q, batch.cache, batch.blocks, batch.context, batch.scale, splits, out, plan)


def attended(batch, plan=None, out=None):
    cut = plan or default_plan(batch.shape.head_dim, batch.q.dtype)
    queries = cut.rows // (batch.shape.heads // batch.shape.kv_heads)
    tiles = torch.from_numpy(prefill_tiles(batch.counts, batch.contexts, queries)).to(batch.q.device)
    pieces = batch.rows, batch.count, batch.context, batch.blocks, tiles
    out = torch.empty_like(batch.q, memory_format=torch.contiguous_format) if out is None else out
    return prefill_attention(batch.q, batch.cache, *pieces, batch.scale, out, plan)


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_edge_of_a_context(dtype, device, generator, group, splits):
    batch = batch_of(SINGLES, dtype, device, generator, group)
    actual = decoded(batch, splits)
    close(actual, batch.expected())
    assert torch.equal(actual[CONTEXTS.index(0)], torch.zeros_like(actual[0]))


@pytest.mark.parametrize("group", [1, 2, 7])
def test_pieces_of_every_kind(dtype, device, generator, group):
    batch = batch_of(PIECES, dtype, device, generator, group)
    close(attended(batch), batch.expected())


@pytest.mark.parametrize(
    ("kernel", "pieces", "head_dim"),
    [
        (partial(decoded, splits=1), SINGLES, 64),
        (partial(decoded, splits=4), SINGLES, 64),
        (decoded, SINGLES, 96),
        (attended, PIECES, 64),
        (attended, PIECES, 96),
    ],
)
def test_a_cache_in_fp8(dtype, device, generator, kernel, pieces, head_dim):
    batch = batch_of(pieces, dtype, device, generator, fp8=True, head_dim=head_dim)
    close(kernel(batch), batch.expected())


@pytest.mark.parametrize("splits", [2, 32])
def test_more_splits_than_tiles(half, device, generator, splits):
    batch = batch_of([(1, 3), (1, 100), (1, 0), (1, 530)], half, device, generator, kv_heads=1)
    close(decoded(batch, splits, plan=SMALL), batch.expected())


@pytest.mark.parametrize("plan", [SMALL, AttentionPlan(32, 64, 4, 3), AttentionPlan(64, 32, 4, 2)])
def test_any_plan(half, device, generator, plan):
    batch = batch_of(PIECES[:7], half, device, generator, kv_heads=1)
    close(attended(batch, plan), batch.expected())


@pytest.mark.parametrize(("kernel", "pieces"), [(decoded, [(1, 40), (1, 81)]), (attended, [(40, 40), (3, 33)])])
@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (3, 16), (1, 96), (7, 48)])
def test_other_heads(half, device, generator, kernel, pieces, group, head_dim):
    batch = batch_of(pieces, half, device, generator, group, kv_heads=1, head_dim=head_dim)
    close(kernel(batch), batch.expected())


@pytest.mark.parametrize(
    ("kernel", "pieces", "index"),
    [
        (decoded, [(1, 40), (1, 5), (1, 33)], torch.int32),
        (decoded, [(1, 40), (1, 5), (1, 33)], torch.int64),
        (attended, [(20, 50), (9, 9)], torch.int64),
    ],
)
def test_a_graphs_static_tables(half, device, generator, kernel, pieces, index):
    batch = batch_of(pieces, half, device, generator, index=index)
    static = torch.zeros((9, 8), dtype=index, device=device)
    static[: len(batch.blocks), : len(pieces)] = batch.blocks
    batch.blocks = static[:, : len(pieces)]
    close(kernel(batch), batch.expected())


@pytest.mark.parametrize("splits", [1, 2])
def test_into_given_rows(half, device, generator, splits):
    batch = batch_of([(1, 40), (1, 5)], half, device, generator)
    wide = torch.full((2, batch.shape.heads + 1, 64), 7.0, dtype=half, device=device)
    out = wide[:, :-1]
    assert decoded(batch, splits, out) is out
    close(out, batch.expected())
    assert (wide[:, -1] == 7).all()


def test_rows_of_no_piece_stay_as_they_are(half, device, generator):
    """The pieces may leave out rows, those of single queries say, and come in any order."""
    batch = batch_of([(4, 4), (6, 30), (5, 21)], half, device, generator)
    expected = batch.expected()
    expected[4:10] = 7
    for name in ("rows", "count", "context", "counts", "contexts"):
        setattr(batch, name, getattr(batch, name)[[2, 0]])
    batch.blocks = batch.blocks[:, [2, 0]]
    wide = torch.full((15, batch.shape.heads + 1, 64), 7.0, dtype=half, device=device)
    out = wide[:, :-1]
    assert attended(batch, SMALL, out) is out
    close(out, expected)
    assert (wide[:, -1] == 7).all()


def test_no_pieces(half, device, generator):
    batch = batch_of([(4, 4)], half, device, generator)
    batch.counts, batch.contexts = batch.counts[:0], batch.contexts[:0]
    assert (attended(batch, out=torch.full_like(batch.q, 7)) == 7).all()


@pytest.mark.parametrize(("kernel", "pieces"), [(decoded, [(1, 70), (1, 130)]), (attended, [(20, 50)])])
def test_scores_beyond_what_exp_can_hold(device, generator, kernel, pieces):
    batch = batch_of(pieces, torch.float32, device, generator)
    batch.q *= 1e3
    close(kernel(batch), batch.expected(), tolerance=5e-3)  # the scores themselves round at 1e-3


@pytest.mark.parametrize(
    ("sequences", "most_tokens", "splits"),
    [(1, 450, 4), (1, 100, 1), (1, 129, 2), (1, 32768, 32), (10, 450, 4), (10, 4096, 4), (64, 450, 1), (400, 9000, 1)],
)
def test_choose_splits(sequences, most_tokens, splits):
    assert choose_splits(sequences, 4, most_tokens, 132) == splits


@pytest.mark.parametrize("queries", [1, 4, 18])
def test_tiles_hold_every_query_once_and_the_longest_first(queries):
    counts, contexts = np.array(PIECES).T
    tiles = prefill_tiles(counts, contexts, queries)
    held = [(piece, query) for piece, first in tiles for query in range(first, min(first + queries, counts[piece]))]
    assert sorted(held) == [(piece, query) for piece, count in enumerate(counts) for query in range(count)]
    seen = [contexts[piece] - counts[piece] + first for piece, first in tiles]
    assert seen == sorted(seen, reverse=True)
    assert tiles.dtype == np.int32


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(splits=3), "splits 3"),
        (dict(splits=64), "splits 64"),
        (dict(tiles=zeros(2, 3, dtype=torch.int32).T), "tiles"),
        (dict(q=zeros(2, 14, 40), keys=zeros(4, BLOCK, 2, 40)), "head_dim"),
        (dict(q=zeros(2, 14, 32)), "head_dim: 32 of q, 64"),
        (dict(keys=zeros(4, 8, 2, 64)), "block_size 8"),
        (dict(keys=zeros(4, 24, 2, 64)), "block_size 24"),
        (dict(q=zeros(2, 13, 64)), "13 heads over 2"),
        (dict(q=zeros(2, 34, 64)), "34 heads over 2"),
        (dict(values=zeros(5, BLOCK, 2, 64)), "differ"),
        (dict(out=zeros(3, 14, 64)), r"out \(3, 14, 64\)"),
        (dict(out=zeros(2, 14, 64).half()), "one dtype"),
        (dict(q=zeros(2, 14, 64).half()), "one dtype"),
        (dict(keys=zeros(4, BLOCK, 2, 64, dtype=torch.float8_e4m3fn)), "one dtype"),
        (dict(key_scales=zeros(4, BLOCK, 2)), "scales are"),
        (dict.fromkeys(("key_scales", "value_scales"), zeros(4, 2, BLOCK)), "scales are"),
        (dict(q=zeros(2, 64, 14).mT), "dimensions of q"),
        (dict(out=zeros(2, 64, 14).mT), "dimensions of out"),
    ],
)
def test_refusals(change, message):
    given = dict(q=zeros(2, 14, 64), keys=zeros(4, BLOCK, 2, 64)) | change
    cache = PagedCache(*(given.get(name, given["keys"]) for name in ("keys", "values")))
    cache = cache._replace(**{name: given[name] for name in PagedCache._fields[2:] if name in given})
    table, context = zeros(1, 2, dtype=torch.int32), zeros(2, dtype=torch.int32)
    out = given.get("out", torch.empty_like(given["q"]))
    with pytest.raises(ValueError, match=message):
        decode_attention(given["q"], cache, table, context, 1.0, given.get("splits", 1), out)
        tiles = given.get("tiles", zeros(1, 2, dtype=torch.int32))
        prefill_attention(given["q"], cache, context, context, context, table, tiles, 1.0, out)
