"""Attention over paged keys and values, of one token each and of many (part of the benchmark `kernels`)."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from bench.kernel_case import CUDA, Call, Case, copies, error, normal, poisoned
from tessera.kernels.operands import AttentionPlan, PagedCache
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles, short_plan

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
DECODES = [(pieces, 1, context) for context in (450, 2400) for pieces in (1, 10, 64, 256)]
PREFILLS = [(26, 316, 316), (4, 1852, 1852), (3, 2364, 2364), (8, 2300, 2300), (1, 512, 4608), (64, 3, 400)]
"""Sequences, the new tokens of each, and the context that ends with those; the last are drafts."""
BLOCK, QUERIES, SCALE = 16, HEADS // KV_HEADS, HEAD_DIM**-0.5


class Paged:
    """Random queries of ``pieces`` sequences, ``count`` of each, and caches of their contexts, whose blocks lie in
    random order and hold not-a-numbers behind a context. There are copies, so that none is read from the L2 cache."""

    def __init__(self, pieces: int, count: int, context: int) -> None:
        self.pieces, self.count, self.context = pieces, count, context
        self.kv_bytes = pieces * context * 2 * KV_HEADS * HEAD_DIM * 2
        most = -(-context // BLOCK)
        several = min(128, len(copies(self.kv_bytes)))
        self.caches = normal(several, 2, pieces * most, BLOCK, KV_HEADS, HEAD_DIM)
        order = torch.randperm(pieces * most, device=CUDA, dtype=torch.int32)
        self.blocks = order.view(pieces, most).T.contiguous()
        self.caches[:, :, self.blocks[-1].long(), context - (most - 1) * BLOCK :] = float("nan")
        self.q = normal(pieces * count, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
        self.out = torch.empty(self.q.shape, dtype=self.q.dtype, device=CUDA)
        self.counts, self.contexts = np.full(pieces, count), np.full(pieces, context)
        arrays = (np.arange(pieces) * count, self.counts, self.contexts)
        self.columns = [torch.from_numpy(each.astype(np.int32)).to(CUDA) for each in arrays]

    def prefills(self, plan: AttentionPlan) -> list[Call]:
        """A call for each copy."""
        tiles = torch.from_numpy(prefill_tiles(self.counts, self.contexts, plan.rows // QUERIES)).to(CUDA)
        where = (*self.columns, self.blocks, tiles, SCALE, self.out, plan)
        return [partial(prefill_attention, self.q, PagedCache(*each), *where) for each in self.caches]

    def error(self, call: Call) -> float:
        """Of ``call``, which reads the first copy, in the first, the middle and the last sequence."""
        self.out.fill_(float("nan"))
        with poisoned():
            call()
        if not bool(self.out.isfinite().all()):
            return float("nan")
        pieces = sorted({0, self.pieces // 2, self.pieces - 1})
        ours = self.out.view(self.pieces, self.count, HEADS, HEAD_DIM)[pieces]
        return error(ours, torch.stack([self._reference(piece) for piece in pieces]))

    def _reference(self, piece: int) -> torch.Tensor:
        """float32 [count, heads, head_dim]."""
        q = self.q[piece * self.count : (piece + 1) * self.count].float().transpose(0, 1)
        numbers = self.blocks[:, piece].long()
        key, value = (
            cache[numbers].flatten(0, 1)[: self.context].float().transpose(0, 1).repeat_interleave(QUERIES, 0)
            for cache in self.caches[0]
        )
        scores = q @ key.mT * SCALE
        position = torch.arange(self.context, device=CUDA)
        scores.masked_fill_(position[None] > position[self.context - self.count :, None], float("-inf"))
        return (scores.softmax(-1) @ value).transpose(0, 1)


def decode() -> Iterator[Case]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for pieces, count, context in DECODES:
        data, splits = Paged(pieces, count, context), choose_splits(pieces, KV_HEADS, context, sms)
        calls: list[Call] = [
            partial(decode_attention, data.q, PagedCache(*each), data.blocks, data.columns[2], SCALE, splits, data.out)
            for each in data.caches
        ]
        yield Case("decode", f"{pieces}x{context}", pieces, {"ours": calls}, data.kv_bytes, data.error(calls[0]))


def prefill() -> Iterator[Case]:
    plans = {"ours": default_plan(HEAD_DIM, torch.bfloat16), "short": short_plan(HEAD_DIM, torch.bfloat16)}
    for pieces, count, context in PREFILLS:
        data = Paged(pieces, count, context)
        ways = {name: data.prefills(plan) for name, plan in plans.items()}
        worst = max(data.error(calls[0]) for calls in ways.values())
        operands = (normal(pieces, heads, n, HEAD_DIM) for heads, n in ((HEADS, count), *[(KV_HEADS, context)] * 2))
        mask = {"is_causal": True} if count == context else {"attn_mask": causal_lower_right(count, context)}
        torchs: Call = partial(F.scaled_dot_product_attention, *operands, scale=SCALE, enable_gqa=True, **mask)
        seen = count * (context - count) + count * (count + 1) // 2
        ways["torch"] = [torchs] * len(ways["ours"])
        flop = 4 * pieces * seen * HEADS * HEAD_DIM
        yield Case("prefill", f"{count} of {context}", pieces, ways, data.kv_bytes, worst, flop)
