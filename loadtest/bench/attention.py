"""Attention kernels on one GPU, in bfloat16, beside torch's own (`make bench NAME=attention`).

The heads are InternVL3-8B's. Prints the ceilings first: copy speed for decoding, a large product for prefill. Then
decoding by batch, context and splits, in GB/s over the keys and values, each read once, and prefill in TFLOP/s over
what the causal mask leaves. Errors are those against attention in float32, in norm: outputs, new memory and slots
behind a context hold not-a-numbers before. Calls go through several copies of the cache, so that none is read from the
L2. $OUT, a folder, gets every row.

    python loadtest/bench attention --only pictures

measures the vision tower's ways of attention within pictures instead (16 heads of 80 values, Qwen2-VL's): the seed's
shape beside the seed's own table, the batches of W5a and W5b, and pictures of many sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import figures
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernels import Call, error, in_turns, poisoned, run
from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.operands import PagedCache
from tessera.kernels.paged_decode import DEFAULT_PLAN, choose_splits, decode_attention
from tessera.kernels.tower_layers import varlen_backends
from tessera.kernels.tuning import graph_milliseconds
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 28, 4, 128, 16
GROUP, SCALE = HEADS // KV_HEADS, HEAD_DIM**-0.5
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
# Together well over the 60 MB of an H200's L2.
CACHE_BYTES, MOST_COPIES = 256 << 20, 128
PICTURE_HEADS, PICTURE_HEAD_DIM = 16, 80
SEED = [7956]
#: milliseconds at that shape on an RTX 4090D, as LightLLM published them
SEEDS_TABLE = {"sgl_kernel": 2.711, "xFormers": 2.791, "SDPA": 2.906}
BATCHES = {
    "the seed's shape": SEED,
    "16 x 1024": [1024] * 16,
    "5 x 5476 (W5a)": [5476] * 5,
    "32 x 1024 (W5b)": [1024] * 32,
    "60 crops and a page": [5476, *(4 * np.random.default_rng(0).integers(8, 150, 60)).tolist()],
}


@dataclass(frozen=True)
class Case:
    """``pieces`` of ``count`` new tokens each, the last of ``context``."""

    pieces: int
    count: int
    context: int

    def __str__(self) -> str:
        cached = self.context - self.count
        return f"{self.pieces}x{self.count}" + (f"+{cached}" if cached else "")

    @property
    def kv_bytes(self) -> int:
        return self.pieces * self.context * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def flop(self) -> int:
        seen = self.count * (self.context - self.count) + self.count * (self.count + 1) // 2
        return self.pieces * seen * 4 * HEADS * HEAD_DIM


DECODES = [Case(pieces, 1, context) for context in (450, 2400) for pieces in (1, 10, 64, 256)]
PREFILLS = [Case(26, 316, 316), Case(4, 1852, 1852), Case(3, 2364, 2364), Case(8, 2300, 2300), Case(1, 512, 4608)]


class Paged:
    """Random queries and caches of one case, its blocks in random order, and the tables on the device."""

    def __init__(self, case: Case, copies: int) -> None:
        self.case = case
        most = -(-case.context // BLOCK)
        shape = (copies, 2, case.pieces * most, BLOCK, KV_HEADS, HEAD_DIM)
        self.caches = torch.randn(shape, dtype=DTYPE, device=DEVICE)
        order = torch.randperm(case.pieces * most, device=DEVICE, dtype=torch.int32)
        self.blocks = order.view(case.pieces, most).T.contiguous()
        self.caches[:, :, self.blocks[-1].long(), case.context - (most - 1) * BLOCK :] = float("nan")
        fused = torch.randn((case.pieces * case.count, HEADS + 2 * KV_HEADS, HEAD_DIM), dtype=DTYPE, device=DEVICE)
        self.q = fused[:, :HEADS]
        self.out = torch.empty(self.q.shape, dtype=DTYPE, device=DEVICE)
        self.counts = np.full(case.pieces, case.count)
        self.contexts = np.full(case.pieces, case.context)
        arrays = (np.arange(case.pieces) * case.count, self.counts, self.contexts)
        self._columns = [torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in arrays]

    def decode(self, splits: int, plan: AttentionPlan = DEFAULT_PLAN) -> list[Call]:
        """One call for each copy of the cache."""

        def call(cache: PagedCache) -> Call:
            context = self._columns[2]
            return lambda: decode_attention(self.q, cache, self.blocks, context, SCALE, splits, self.out, plan)

        return [call(PagedCache(*each)) for each in self.caches]

    def prefill(self, plan: AttentionPlan) -> list[Call]:
        """One call for each copy of the cache."""
        tiles = torch.from_numpy(prefill_tiles(self.counts, self.contexts, plan.rows // GROUP)).to(DEVICE)

        def call(cache: PagedCache) -> Call:
            return lambda: prefill_attention(self.q, cache, *self._columns, self.blocks, tiles, SCALE, self.out, plan)

        return [call(PagedCache(*each)) for each in self.caches]

    def error(self, call: Call) -> float:
        """Of ``call``, which reads the first copy, in the first, the middle and the last piece."""
        self.out.fill_(float("nan"))
        with poisoned():
            call()
        if not bool(self.out.isfinite().all()):
            return float("nan")
        pieces = sorted({0, self.case.pieces // 2, self.case.pieces - 1})
        ours = self.out.view(self.case.pieces, self.case.count, HEADS, HEAD_DIM)[pieces].float()
        theirs = torch.stack([self._reference(piece) for piece in pieces])
        return error(ours, theirs)

    def _reference(self, piece: int) -> torch.Tensor:
        """float32 [count, heads, head_dim]."""
        case = self.case
        q = self.q[piece * case.count : (piece + 1) * case.count].float().transpose(0, 1)
        numbers = self.blocks[:, piece].long()
        key, value = (
            cache[numbers].flatten(0, 1)[: case.context].float().transpose(0, 1).repeat_interleave(GROUP, 0)
            for cache in self.caches[0]
        )
        scores = q @ key.mT * SCALE
        position = torch.arange(case.context, device=DEVICE)
        scores.masked_fill_(position[None] > position[case.context - case.count :, None], float("-inf"))
        return (scores.softmax(-1) @ value).transpose(0, 1)


def copies_of(case: Case) -> int:
    return max(2, min(MOST_COPIES, -(-CACHE_BYTES // case.kv_bytes)))


def rivals(case: Case) -> Iterator[tuple[str, list[Call]]]:
    """torch's kernels on contiguous keys of the same lengths."""
    q = torch.randn((case.pieces, case.count, HEADS, HEAD_DIM), dtype=DTYPE, device=DEVICE)
    kv = torch.randn((2, case.pieces, case.context, KV_HEADS, HEAD_DIM), dtype=DTYPE, device=DEVICE)
    key, value = kv
    mask = None if case.count == case.context else causal_lower_right(case.count, case.context)

    def sdpa(backend: SDPBackend) -> Call:
        heads_first = [x.transpose(1, 2) for x in (q, key, value)]

        def call() -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(
                    *heads_first, attn_mask=mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
                )

        return call

    yield "sdpa flash", [sdpa(SDPBackend.FLASH_ATTENTION)] * 4
    yield "sdpa cudnn", [sdpa(SDPBackend.CUDNN_ATTENTION)] * 4
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    packed = [x.flatten(0, 1) for x in (q, key, value)]
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        packed[1:] = [x.repeat_interleave(GROUP, 1) for x in packed[1:]]
    ends = torch.arange(case.pieces + 1, device=DEVICE, dtype=torch.int32)
    lengths = (ends * case.count, ends * case.context, case.count, case.context)
    yield "varlen_attn", [lambda: varlen_attn(*packed, *lengths, **options)] * 4


def decode(stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    """Beside the splits that serve, fewer and more."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for case in DECODES:
        data, chosen = Paged(case, copies_of(case)), choose_splits(case.pieces, KV_HEADS, case.context, sms)
        ways = {splits: data.decode(splits) for splits in sorted({1, max(1, chosen // 2), chosen, min(32, 2 * chosen)})}
        taken = in_turns({str(splits): calls for splits, calls in ways.items()}, stream)
        for splits, calls in ways.items():
            seconds = taken[str(splits)]
            row = {"kernel": "decode", "case": f"{case.pieces}x{case.context}", "splits": splits}
            row |= {"serves": splits == chosen, "us": 1e6 * seconds, "gb_s": case.kv_bytes / seconds / 1e9}
            yield row | {"error": data.error(calls[0])}


def prefill(stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    for case in PREFILLS:
        data = Paged(case, 4)
        for name, calls in {"ours": data.prefill(default_plan(HEAD_DIM, DTYPE)), **dict(rivals(case))}.items():
            row: dict[str, Any] = {"kernel": "prefill", "case": str(case), "way": name}
            try:
                seconds = in_turns({name: calls}, stream)[name]
            except (RuntimeError, TypeError, ValueError) as refusal:
                yield row | {"refused": str(refusal)[:60]}
                continue
            row |= {"us": 1e6 * seconds, "tflop_s": case.flop / seconds / 1e12}
            yield row | ({"error": data.error(calls[0])} if name == "ours" else {})


def pictures() -> Iterator[dict[str, Any]]:
    """Each way at each batch; then the figure of the seed's shape."""
    inputs = {name: _random(lengths) for name, lengths in BATCHES.items()}
    at_seed: dict[str, float] = {}
    for name, way in varlen_backends(DEVICE, True).items():
        for batch, lengths in BATCHES.items():
            row: dict[str, Any] = {"kernel": "pictures", "case": batch, "way": name}
            try:
                attend = way(lengths, DEVICE)
                ms = graph_milliseconds(partial(attend, *inputs[batch]))
                wrong = _error(attend(*inputs[batch]), inputs[batch], lengths)
            except Exception as refusal:  # a way that cannot do it: any library's own error
                yield row | {"refused": str(refusal)[:60]}
                continue
            if lengths is SEED:
                at_seed[name] = round(ms, 4)
            flop = 4 * sum(length**2 for length in lengths) * PICTURE_HEADS * PICTURE_HEAD_DIM
            yield row | {"us": 1e3 * ms, "tflop_s": flop / ms / 1e9, "error": wrong}
    best = min(at_seed, key=at_seed.__getitem__)
    notes = {"way": best, "ways": at_seed, "seeds_table_4090d": SEEDS_TABLE}
    figures.emit("vision.attention_seed.ms", at_seed[best], "ms", **notes)


def _random(lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Query, key and value as the tower has them: views of one product."""
    qkv = torch.randn(sum(lengths), 3, PICTURE_HEADS, PICTURE_HEAD_DIM, device=DEVICE, dtype=DTYPE)
    return qkv.unbind(1)


def _error(rows: torch.Tensor, inputs: Sequence[torch.Tensor], lengths: Sequence[int]) -> float:
    """Of the last 300 rows of the first and the last picture, the larger, against float32."""
    found = []
    for begin, length in ((0, lengths[0]), (sum(lengths) - lengths[-1], lengths[-1])):
        picture = slice(begin, begin + length)
        query, key, value = (each[picture].float().transpose(0, 1) for each in inputs)
        weights = (query[:, -300:] @ key.mT * PICTURE_HEAD_DIM**-0.5).softmax(-1)
        found.append(error(rows[picture][-300:].float(), (weights @ value).transpose(0, 1).flatten(1)))
    return max(found)


def main() -> int:
    groups = {"decode": decode, "prefill": prefill, "pictures": lambda stream: pictures()}
    return run(str(__doc__), groups, ["decode", "prefill"])


if __name__ == "__main__":
    raise SystemExit(main())
