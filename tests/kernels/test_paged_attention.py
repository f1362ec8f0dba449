"""Attention over paged keys and values, of single queries and of pieces of prompts, against the oracle backend."""

from functools import partial

import pytest
import torch
from paged_fakes import BLOCK, PagedBatch, close, shape_of

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels import row_attention
from tessera.kernels.operands import AttentionPlan, PagedCache
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.row_attention import lane_programs, row_decode, row_prefill
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# (count, context): around the edges of blocks and tiles, single queries, cached prefixes of any length.
PIECES = [(1, 1), (1, 40), (20, 20), (33, 97), (16, 32), (17, 65), (3, 131)]
# Around the edges of blocks and of tiles of 64, and nothing at all.
SINGLES = [(1, context) for context in (1, 0, 16, 63, 65, 200)]
# The same of tiles of 128, the last position apart; more than a tile for each of two programs.
SETTLED = [(1, context) for context in (1, 0, 2, 128, 129, 257, 300)]


empty_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


def batch_of(pieces, dtype, device, generator, group=7, fp8=False, **shape):
    counts, contexts = zip(*pieces)
    return PagedBatch(shape_of(group, **shape), counts, contexts, dtype, device, generator, fp8)


def decoded(batch, splits=2, **options):
    given = batch.q, batch.cache, batch.blocks, batch.context, batch.scale, splits, empty_like(batch.q)
    return decode_attention(*given, **options)


def attended(batch):
    plan = default_plan(batch.shape.head_dim, batch.q.dtype)
    queries = plan.rows // (batch.shape.heads // batch.shape.kv_heads)
    tiles = torch.from_numpy(prefill_tiles(batch.counts, batch.contexts, queries)).to(batch.q.device)
    pieces = batch.rows, batch.count, batch.context, batch.blocks, tiles
    return prefill_attention(batch.q, batch.cache, *pieces, batch.scale, empty_like(batch.q))


@pytest.fixture
def short_lanes(monkeypatch):
    """Segments of one tile, so that a context of some has lanes of several."""
    monkeypatch.setattr(row_attention, "SEGMENT", 64)
    monkeypatch.setattr(row_attention, "LANES", 2)


@pytest.mark.usefixtures("short_lanes")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("programs", [0, 1, 2])
def test_lanes_are_the_whole_context(half, device, generator, programs, fp8):
    """Without programs of single queries, a piece's program does all lanes."""
    singles = [(1, context) for context in (1, 0, 64, 65, 129, 200)]
    pieces = singles if programs else [(1, 1), (20, 70), (3, 131), (4, 260)]
    batch = batch_of(pieces, half, device, generator, 3, fp8)
    out, plan = empty_like(batch.q), AttentionPlan(64, 64, 4, 2)
    if programs:
        row_decode(batch.q, batch.cache, batch.blocks, batch.context, batch.scale, programs, out)
    else:
        tiles = torch.from_numpy(prefill_tiles(batch.counts, batch.contexts, plan.rows // 3)).to(device)
        lines = batch.rows, batch.count, batch.context, batch.blocks, tiles
        row_prefill(batch.q, batch.cache, *lines, batch.scale, out, plan)
    close(out, batch.expected())


@pytest.mark.parametrize(("sequences", "programs"), [(1, 16), (10, 8), (64, 1), (400, 1)])
def test_how_many_programs_share_the_lanes(sequences, programs):
    assert lane_programs(sequences, 4, 132) == programs


HEADS = [(7, 64, False), (7, 64, True), (1, 96, True), (16, 128, False), (3, 16, False)]


@pytest.mark.parametrize(
    ("kernel", "pieces", "group", "head_dim", "fp8"),
    [
        *((attended, PIECES, *heads) for heads in HEADS),
        *((partial(decoded, splits=4), SINGLES, *heads) for heads in HEADS),
        *((partial(decoded, splits=1), SINGLES, *heads) for heads in HEADS[:2]),
        *((partial(decoded, splits=2, settled=True), SETTLED, *heads) for heads in HEADS),
        (partial(decoded, splits=1, settled=True), SETTLED, *HEADS[0]),
    ],
)
def test_every_edge(dtype, device, generator, kernel, pieces, group, head_dim, fp8):
    """Of a sequence that sees nothing the rows are zeros."""
    batch = batch_of(pieces, dtype, device, generator, group, fp8, head_dim=head_dim)
    close(kernel(batch), batch.expected())


@pytest.mark.parametrize(("kernel", "pieces"), [(decoded, [(1, 70), (1, 130)]), (attended, [(20, 50)])])
def test_scores_beyond_what_exp_can_hold(device, generator, kernel, pieces):
    batch = batch_of(pieces, torch.float32, device, generator)
    batch.q *= 1e3
    close(kernel(batch), batch.expected(), tolerance=5e-3)  # the scores themselves round at 1e-3


@pytest.mark.parametrize(
    ("sequences", "most_tokens", "splits"),
    [(1, 450, 8), (1, 64, 1), (1, 129, 4), (1, 32768, 32), (10, 450, 8), (10, 4096, 8), (64, 450, 1), (400, 9000, 1)],
)
def test_choose_splits(sequences, most_tokens, splits):
    assert choose_splits(sequences, 4, most_tokens, 132) == splits


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
        if "tiles" in given:
            prefill_attention(given["q"], cache, context, context, context, table, given["tiles"], 1.0, out)
        decode_attention(given["q"], cache, table, context, 1.0, given.get("splits", 1), out)
