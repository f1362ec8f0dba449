"""Attention on the CPU is attention written out, over what the cache holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.paged_fakes import attention_of

from tessera.attention.backend import AttentionStep, HeadShape, KvStorage, SpanTable, create_backend, rotate, slots_of
from tessera.errors import ConfigError
from tessera.kernels.fp8_rows import quantize_rows

SHAPE = HeadShape(heads=6, kv_heads=2, head_dim=8)
BLOCK, BLOCKS = 4, 40


def random_batch(seed, spans, fp8=False):
    """``spans``: (start, count) of each sequence; returns storage, table, slots and the fused new rows."""
    generator = torch.Generator().manual_seed(seed)
    storage = KvStorage(1, (BLOCKS, BLOCK, SHAPE.kv_heads, SHAPE.head_dim), torch.float32, torch.device("cpu"), fp8)
    new = torch.randn(2, BLOCKS * BLOCK, SHAPE.kv_heads, SHAPE.head_dim, generator=generator)
    storage.write(0, torch.arange(BLOCKS * BLOCK), *new)
    start, count = np.array(spans).T
    context = start + count
    order = torch.randperm(BLOCKS, generator=generator).numpy()
    blocks, slots = np.zeros((len(spans), 8), np.int64), []
    for line, (first, number) in zip(blocks, spans):
        used = -(-(first + number) // BLOCK)
        line[:used], order = order[:used], order[used:]
        positions = np.arange(first, first + number)
        slots.append(line[positions // BLOCK] * BLOCK + positions % BLOCK)
    table = SpanTable(np.cumsum(count) - count, count, context, blocks)
    width = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    qkv = torch.randn(int(count.sum()), width, generator=generator)
    return storage, table, torch.from_numpy(np.concatenate(slots)), qkv


def step_of(backend, table, slots, rows=None):
    generator = torch.Generator().manual_seed(9)
    angles = torch.randn(len(slots), SHAPE.head_dim // 2, generator=generator)
    return AttentionStep(angles.cos(), angles.sin(), slots, rows, backend.plan(table))


BATCHES = {
    "decodes": [(5, 1), (0, 1), (17, 1)],
    "prompts": [(0, 7), (0, 12)],
    "pieces": [(4, 5), (8, 8), (3, 2)],
    "drafts": [(9, 5), (7, 6), (20, 7), (3, 1)],
    "mixed": [(9, 1), (31, 1), (0, 6), (6, 7)],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["sdpa", "fixed"])
def test_it_is_attention_written_out(batch, fp8, kind):
    storage, table, slots, qkv = random_batch(1, BATCHES[batch], fp8)
    backend = create_backend(kind, SHAPE, storage)
    step = step_of(backend, table, slots)
    attended = backend.attend(0, qkv, step)
    heads = qkv.view(len(qkv), -1, SHAPE.head_dim)
    q, k = (rotate(x, step.cos, step.sin) for x in (heads[:, :6], heads[:, 6:8]))
    for stored, new in zip(storage.read(0, slots), (k, heads[:, 8:])):
        torch.testing.assert_close(stored, new, atol=1e-6, rtol=0.07 if fp8 else 0)
    for row, count, context, blocks in zip(table.row, table.count, table.context, table.blocks):
        read = storage.read(0, torch.from_numpy(slots_of(blocks, np.arange(context), BLOCK)))
        expected = attention_of(q[row : row + count], *read).flatten(1)
        torch.testing.assert_close(attended[row : row + count], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("samples", [[1, 4, 1, 3], [1, 1, 2, 0], [1, 4, 1, 0]])
def test_rows_of_one_sequence_are_attended_as_if_each_stood_alone(samples):
    """As the last layer has them where drafts are verified, beside the one row of a prompt."""
    storage, table, slots, qkv = random_batch(2, [(9, 1), (14, 5), (0, 6), (21, 3)])
    backend = create_backend("sdpa", SHAPE, storage)
    last = table.last(np.array(samples))
    rows, singles = torch.from_numpy(last.row), table.singles(last)
    together = step_of(backend, singles, slots, rows)
    assert sum(len(group.rows) for group in together.plan) == sum(map(bool, samples))
    found = backend.attend(0, qkv, together)
    for at in range(len(rows)):
        columns = (singles.row[:1], singles.count[:1], singles.context[at : at + 1], singles.blocks[at : at + 1])
        one = replace(together, rows=rows[at : at + 1], plan=backend.plan(SpanTable(*columns)))
        torch.testing.assert_close(found[at], backend.attend(0, qkv, one)[0], atol=1e-5, rtol=1e-5)


def test_the_only_head_of_wider_rows_is_stored_in_fp8(monkeypatch):
    """One head's rows have gaps, and the kernel that quantizes them on a GPU wants none."""
    given = []
    monkeypatch.setattr(
        "tessera.attention.backend.quantize_rows", lambda x: given.append(x.is_contiguous()) or quantize_rows(x)
    )
    storage = KvStorage(1, (BLOCKS, BLOCK, 1, 16), torch.float32, torch.device("cpu"), fp8=True)
    storage.write(0, torch.arange(5), *torch.randn(5, 4, 16).split(1, dim=1)[:2])
    assert given == [True, True]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["sdpa", "fixed"])
def test_what_others_left_in_the_cache_is_not_read(batch, fp8, kind):
    """NaN times a weight of 0 is NaN, so behind a context nothing may be read, not even to be masked."""
    healthy, sick = random_batch(4, BATCHES[batch], fp8), random_batch(4, BATCHES[batch], fp8)
    storage, table, _, _ = sick
    whole = (table.blocks[..., None] * BLOCK + np.arange(BLOCK)).reshape(len(table.blocks), -1)
    own = [line[:context] for line, context in zip(whole, table.context)]
    others = np.setdiff1d(np.arange(BLOCKS * BLOCK), np.concatenate(own))
    nothing = torch.full((2, len(others), SHAPE.kv_heads, SHAPE.head_dim), float("nan"))
    storage.write(0, torch.from_numpy(others), *nothing)
    results = []
    for storage, table, slots, qkv in (healthy, sick):
        backend = create_backend(kind, SHAPE, storage)
        results.append(backend.attend(0, qkv, step_of(backend, table, slots)))
    torch.testing.assert_close(*results, atol=0, rtol=0)


def test_unknown_backend():
    with pytest.raises(ConfigError, match="'flash'"):
        create_backend("flash", SHAPE, None)
