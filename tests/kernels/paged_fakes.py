"""Random sequences in a paged cache that is poison wherever no sequence may look."""

import numpy as np
import torch

from tessera.attention.backend import HeadShape, KvStorage, SpanTable, slots_of

BLOCK = 16
# Roundings of the output, and of the weights before they meet the values.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


class PagedBatch:
    """Sequences of ``contexts`` positions in shuffled blocks; the last ``counts`` of each are packed queries.

    ``q`` [n, heads, head_dim] is a part of wider rows. ``blocks`` [most, s] and the others are on the device.
    """

    def __init__(self, shape, counts, contexts, dtype, device, generator, fp8=False):
        self.shape, self.scale = shape, shape.head_dim**-0.5
        self.counts, self.contexts = np.array(counts), np.array(contexts)
        used = -(-self.contexts // BLOCK)
        spare = 3
        cache = (int(used.sum()) + spare, BLOCK, shape.kv_heads, shape.head_dim)
        self.storage = KvStorage(1, cache, dtype, torch.device(device), fp8)
        order = torch.randperm(int(used.sum()) + spare, generator=torch.Generator().manual_seed(1)).numpy()
        nobody, order = order[0], order[spare:]
        table = np.full((len(used), max(1, used.max())), nobody)
        poison = torch.full((cache[0] * BLOCK, *cache[2:]), float("nan"), dtype=dtype, device=device)
        self.storage.write(0, torch.arange(len(poison), device=device), poison, poison)
        for line, number, context in zip(table, used, contexts):
            line[:number], order = order[:number], order[number:]
            position = torch.arange(context, device=device)
            slots = torch.from_numpy(line).to(device)[position // BLOCK] * BLOCK + position % BLOCK
            new = torch.randn(
                (2, context, shape.kv_heads, shape.head_dim), generator=generator, device=device, dtype=dtype
            )
            self.storage.write(0, slots, new[0], new[1])
        self.row = np.cumsum(self.counts) - self.counts
        self.table = SpanTable(self.row, self.counts, self.contexts, table)
        wide = shape.heads + 2 * shape.kv_heads
        n = int(self.counts.sum())
        fused = torch.randn((n, wide, shape.head_dim), generator=generator, device=device, dtype=dtype)
        self.q = fused[:, : shape.heads]
        arrays = (table.T.copy(), self.contexts, self.counts, self.row)
        self.blocks, self.context, self.count, self.rows = (torch.from_numpy(x).to(device) for x in arrays)

    @property
    def cache(self):
        return self.storage.layers[0]

    def expected(self):
        """A loop over sequences, softmax written out; zeros for queries that see nothing."""
        out = torch.zeros(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        for row, count, context, blocks in zip(self.row, self.counts, self.contexts, self.table.blocks):
            if context:
                slots = torch.from_numpy(slots_of(blocks, np.arange(context), BLOCK)).to(out.device)
                read = (part.float() for part in self.storage.read(0, slots))
                out[row : row + count] = attention_of(self.q[row : row + count], *read)
        return out


def attention_of(q, keys, values):
    """The last queries' of a sequence, [n, heads, head_dim]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[-1] ** -0.5
    unseen = torch.ones(scores.shape[1:], device=q.device).triu(len(keys) - len(q) + 1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), values).to(q.dtype)


def shape_of(group, kv_heads=2, head_dim=64):
    return HeadShape(group * kv_heads, kv_heads, head_dim)


def close(actual, expected, tolerance=None):
    tolerance = tolerance or TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
