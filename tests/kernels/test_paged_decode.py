"""Paged decode attention against the oracle backend."""

from __future__ import annotations

import pytest
import torch
from paged_fakes import BLOCK, PagedBatch, close, shape_of

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.operands import PagedCache
from tessera.kernels.paged_decode import choose_splits, decode_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Around the edges of blocks and of tiles of 64, and nothing at all.
CONTEXTS = [1, 15, 0, 16, 17, 63, 64, 65, 200]


def decoded(batch, splits, **options):
    return decode_attention(batch.q, batch.cache, batch.blocks, batch.context, batch.scale, splits, **options)


def batch_of(contexts, dtype, device, generator, group=7, index=torch.int32, fp8=False, **shape):
    return PagedBatch(shape_of(group, **shape), [1] * len(contexts), contexts, dtype, device, generator, index, fp8)


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_edge_of_a_context(dtype, device, generator, group, splits):
    batch = batch_of(CONTEXTS, dtype, device, generator, group)
    actual = decoded(batch, splits)
    close(actual, batch.expected())
    assert torch.equal(actual[CONTEXTS.index(0)], torch.zeros_like(actual[0]))


@pytest.mark.parametrize(("splits", "head_dim"), [(1, 64), (4, 64), (2, 96)])
def test_a_cache_in_fp8(dtype, device, generator, splits, head_dim):
    batch = batch_of(CONTEXTS, dtype, device, generator, fp8=True, head_dim=head_dim)
    close(decoded(batch, splits), batch.expected())


@pytest.mark.parametrize("splits", [2, 32])
def test_more_splits_than_tiles(half, device, generator, splits):
    batch = batch_of([3, 100, 0, 530], half, device, generator, kv_heads=1)
    close(decoded(batch, splits, plan=AttentionPlan(16, 16, 4, 3)), batch.expected())


@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (3, 16), (1, 96), (7, 48)])
def test_other_heads(half, device, generator, group, head_dim):
    batch = batch_of([40, 81], half, device, generator, group, kv_heads=1, head_dim=head_dim)
    close(decoded(batch, 2), batch.expected())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_graphs_static_tables(half, device, generator, index):
    batch = batch_of([40, 5, 33], half, device, generator, index=index)
    static = torch.zeros((9, 8), dtype=index, device=device)
    static[: len(batch.blocks), :3] = batch.blocks
    batch.blocks = static[:, :3]
    close(decoded(batch, 2), batch.expected())


@pytest.mark.parametrize("splits", [1, 2])
def test_into_given_rows(half, device, generator, splits):
    batch = batch_of([40, 5], half, device, generator)
    wide = torch.full((2, batch.shape.heads + 1, 64), 7.0, dtype=half, device=device)
    out = wide[:, :-1]
    assert decoded(batch, splits, out=out) is out
    close(out, batch.expected())
    assert (wide[:, -1] == 7).all()


def test_scores_beyond_what_exp_can_hold(device, generator):
    batch = batch_of([70, 130], torch.float32, device, generator)
    batch.q *= 1e3
    close(decoded(batch, 2), batch.expected(), tolerance=5e-3)  # the scores themselves round at 1e-3


def test_nobody_sees_anything(half, device, generator):
    batch = batch_of([0, 0], half, device, generator)
    for splits in (1, 8):
        assert torch.equal(decoded(batch, splits), torch.zeros_like(batch.q))


@pytest.mark.parametrize(
    ("sequences", "most_tokens", "splits"),
    [(1, 450, 4), (1, 100, 1), (1, 129, 2), (1, 32768, 32), (10, 450, 4), (10, 4096, 4), (64, 450, 1), (400, 9000, 1)],
)
def test_choose_splits(sequences, most_tokens, splits):
    assert choose_splits(sequences, 4, most_tokens, 132) == splits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(splits=3), "splits 3"),
        (dict(splits=64), "splits 64"),
        (dict(q=torch.zeros(2, 14, 40), keys=torch.zeros(4, BLOCK, 2, 40)), "head_dim"),
        (dict(q=torch.zeros(2, 14, 32)), "head_dim: 32 of q, 64"),
        (dict(keys=torch.zeros(4, 8, 2, 64)), "block_size 8"),
        (dict(q=torch.zeros(2, 13, 64)), "13 heads over 2"),
        (dict(q=torch.zeros(2, 34, 64)), "34 heads over 2"),
        (dict(values=torch.zeros(5, BLOCK, 2, 64)), "differ"),
        (dict(out=torch.zeros(3, 14, 64)), r"out \(3, 14, 64\)"),
        (dict(q=torch.zeros(2, 14, 64).half()), "one dtype"),
        (dict(keys=torch.zeros(4, BLOCK, 2, 64, dtype=torch.float8_e4m3fn)), "one dtype"),
        (dict(key_scales=torch.zeros(4, BLOCK, 2)), "scales are"),
        (dict.fromkeys(("key_scales", "value_scales"), torch.zeros(4, 2, BLOCK)), "scales are"),
        (dict(q=torch.zeros(2, 64, 14).mT), "dimensions of q"),
        (dict(out=torch.zeros(2, 64, 14).mT), "dimensions of out"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        q=torch.zeros(2, 14, 64),
        keys=torch.zeros(4, BLOCK, 2, 64),
        blocks=torch.zeros(1, 2, dtype=torch.int32),
        context=torch.zeros(2, dtype=torch.int32),
        scale=1.0,
        splits=1,
    )
    arguments |= change
    arguments.setdefault("values", torch.zeros_like(arguments["keys"]))
    cache = PagedCache(**{name: arguments.pop(name) for name in PagedCache._fields if name in arguments})
    with pytest.raises(ValueError, match=message):
        decode_attention(cache=cache, **arguments)
