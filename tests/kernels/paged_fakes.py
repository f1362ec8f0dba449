"""Random sequences in a paged cache that is poison wherever no sequence may look."""

from __future__ import annotations

import numpy as np
import torch

from tessera.attention.backend import HeadShape, KvStorage, SpanTable
from tessera.attention.torch_backend import TorchBackend

BLOCK = 16
# Roundings of the output, and of the weights before they meet the values.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


class PagedBatch:
    """Sequences of ``contexts`` positions in shuffled blocks; the last ``counts`` of each are packed queries.

    ``q`` [n, heads, head_dim] is a part of wider rows. ``blocks`` [most, s] and the others are on the device.
    """

    def __init__(self, shape, counts, contexts, dtype, device, generator, index=torch.int32, fp8=False):
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
        self.blocks, self.context, self.count, self.rows = (torch.from_numpy(x).to(device, index) for x in arrays)

    @property
    def cache(self):
        return self.storage.layers[0]

    def expected(self):
        """What the oracle backend makes of the batch; zeros for queries that see nothing."""
        out = torch.zeros(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        seeing = self.contexts > 0
        columns = (self.table.row, self.table.count, self.table.context, self.table.blocks)
        table = SpanTable(*(column[seeing] for column in columns))
        rows = torch.from_numpy(np.repeat(seeing, self.counts))
        attended = TorchBackend(self.shape, self.storage)._attend(0, self.q, self.q, self.q, table)
        out[rows] = attended[rows]
        return out


def shape_of(group, kv_heads=2, head_dim=64):
    return HeadShape(group * kv_heads, kv_heads, head_dim)


def close(actual, expected, tolerance=None):
    tolerance = tolerance or TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
