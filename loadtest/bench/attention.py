"""The engine's two attention kernels on one GPU, at the heads of InternVL3-8B, in bfloat16.

Prints the ceilings first: copy speed for decoding, a large product for prefill. Then decoding by batch, context and
splits, in GB/s over the keys and values, each read once; prefill in TFLOP/s over what the causal mask leaves, beside
torch's own kernels on contiguous keys; and sweeps over both kernels' plans. Every error is that against attention in
float32, in norm, on fresh random data: outputs, new memory and slots behind a context hold not-a-numbers before.
A call is timed in a CUDA graph that goes through several copies of the cache, so that none is read from the L2.
$OUT, a folder, gets every measurement.

    PYTHONPATH=python_backends python loadtest/bench attention [--seconds 65]

With --pictures the vision tower's ways for pictures of any sizes are measured instead (picture_attention.py).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from triton.runtime.errors import TritonError

from bench import picture_attention
from tessera.kernels.attention_plan import AttentionPlan
from tessera.kernels.paged_decode import DEFAULT_PLAN, DecodePlan, choose_splits, decode_attention
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 28, 4, 128, 16
GROUP, SCALE = HEADS // KV_HEADS, HEAD_DIM**-0.5
DEVICE, DTYPE = "cuda", torch.bfloat16
# Together well over the 60 MB of an H200's L2.
CACHE_BYTES, MOST_COPIES = 256 << 20, 128
TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm

Call = Callable[[], Any]


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
DECODE_SWEEP = [Case(1, 1, 450), Case(10, 1, 450), Case(64, 1, 450)]
DECODE_PLANS = [
    DecodePlan(*numbers) for numbers in ((32, 4, 3), (32, 2, 4), (64, 2, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
]
PREFILLS = [Case(26, 316, 316), Case(4, 1852, 1852), Case(3, 2364, 2364), Case(8, 2300, 2300), Case(1, 512, 4608)]
PREFILL_PLANS = [
    AttentionPlan(*numbers)
    for numbers in (
        *((128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 3, 128)),
        *((128, 32, 8, 4), (128, 64, 8, 2, 128), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2)),
    )
]


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

    def decode(self, splits: int, plan: DecodePlan = DEFAULT_PLAN) -> list[Call]:
        """One call for each copy of the cache."""

        def call(keys: torch.Tensor, values: torch.Tensor) -> Call:
            context = self._columns[2]
            return lambda: decode_attention(self.q, keys, values, self.blocks, context, SCALE, splits, self.out, plan)

        return [call(keys, values) for keys, values in self.caches]

    def prefill(self, plan: AttentionPlan) -> list[Call]:
        """One call for each copy of the cache."""
        tiles = torch.from_numpy(prefill_tiles(self.counts, self.contexts, plan.rows // GROUP)).to(DEVICE)

        def call(keys: torch.Tensor, values: torch.Tensor) -> Call:
            return lambda: prefill_attention(
                self.q, keys, values, *self._columns, self.blocks, tiles, SCALE, self.out, plan
            )

        return [call(keys, values) for keys, values in self.caches]

    def error(self, call: Call) -> float:
        """Of ``call``, which reads the first copy, in the first, the middle and the last piece."""
        torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty give not-a-numbers
        self.out.fill_(float("nan"))
        call()
        torch.use_deterministic_algorithms(False)
        if not bool(self.out.isfinite().all()):
            return float("nan")
        pieces = sorted({0, self.case.pieces // 2, self.case.pieces - 1})
        ours = self.out.view(self.case.pieces, self.case.count, HEADS, HEAD_DIM)[pieces].float()
        theirs = torch.stack([self._reference(piece) for piece in pieces])
        return float((ours - theirs).norm() / theirs.norm())

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


def measure(calls: list[Call]) -> float:
    """Median milliseconds of one of the calls, which run one after the other in a CUDA graph."""
    for call in calls[:2]:
        call()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / len(calls)


def ceilings() -> tuple[float, float]:
    """GB/s of a copy, both directions counted, and TFLOP/s of a product of two 8,192-square matrices."""
    a, b = torch.randn((2, 8192, 8192), dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(a)
    product = 2 * 8192**3 / measure([lambda: torch.mm(a, b, out=out)] * 4) / 1e9
    source, target = torch.empty((2, 1 << 30), dtype=torch.uint8, device=DEVICE)
    copy = 2 * source.numel() / measure([lambda: target.copy_(source)] * 4) / 1e6
    return copy, product


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


class Bench:
    """Prints as it measures, keeps everything, and stops sweeping when the time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.lines: list[dict[str, Any]] = []
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count

    def late(self) -> bool:
        return time.monotonic() > self._end

    def keep(self, kernel: str, case: Case, ms: float, **notes: Any) -> float:
        self.lines.append({"kernel": kernel, "case": str(case), "context": case.context, "ms": ms, **notes})
        return ms

    def decode(self) -> None:
        print("\ndecode: us, GB/s, error; * the splits that choose_splits picks", flush=True)
        for case in DECODES:
            data = Paged(case, copies_of(case))
            chosen = choose_splits(case.pieces, KV_HEADS, case.context, self._sms)
            cells = []
            for splits in sorted({1, max(1, chosen // 2), chosen, min(32, 2 * chosen)}):
                calls = data.decode(splits)
                error = data.error(calls[0])
                ms = self.keep("decode", case, measure(calls), splits=splits, error=error)
                star = "*" if splits == chosen else ""
                cells.append(f"{splits}{star}: {ms * 1e3:.1f} {case.kv_bytes / ms / 1e6:.0f} {error:.4f}")
            print(f"{case.pieces} x {case.context}   " + "   ".join(cells), flush=True)

    def prefill(self) -> None:
        plan = default_plan(HEAD_DIM, DTYPE)
        print(f"\nprefill: ms, TFLOP/s, error; ours is {plan}", flush=True)
        for case in PREFILLS:
            data = Paged(case, 4)
            calls = data.prefill(plan)
            error = data.error(calls[0])
            ms = self.keep("prefill", case, measure(calls), plan=asdict(plan), error=error)
            cells = [f"ours {ms:.4f} {case.flop / ms / 1e9:.0f} {error:.4f}"]
            for name, theirs in rivals(case):
                try:
                    ms = self.keep(name, case, measure(theirs))
                    cells.append(f"{name} {ms:.4f} {case.flop / ms / 1e9:.0f}")
                except (RuntimeError, TypeError, ValueError) as refusal:
                    cells.append(f"{name} refused: {str(refusal)[:60]!r}")
            print(f"{case}   " + "   ".join(cells), flush=True)

    def prefill_sweep(self) -> None:
        print("\nprefill plans, rows/tokens/warps/stages/registers: ms at " + ", ".join(map(str, PREFILLS)), flush=True)
        data = [Paged(case, 4) for case in PREFILLS]
        best: dict[Case, tuple[float, AttentionPlan]] = {}
        for plan in (default_plan(HEAD_DIM, DTYPE), *PREFILL_PLANS):
            if self.late():
                print("no time for the rest", flush=True)
                break
            cells = []
            try:
                for paged in data:
                    calls = paged.prefill(plan)
                    error = paged.error(calls[0])
                    ms = self.keep("prefill", paged.case, measure(calls), plan=asdict(plan), error=error)
                    cells.append(f"{ms:.4f}" + verdict(error))
                    if not verdict(error):
                        best[paged.case] = min(best.get(paged.case, (ms, plan)), (ms, plan), key=lambda pair: pair[0])
            except TritonError as refusal:  # a plan may want more shared memory than there is
                cells.append(str(refusal)[:80])
            print(f"{plan}   " + " ".join(cells), flush=True)
        for case, (ms, plan) in best.items():
            print(f"best at {case}: {plan} {ms:.4f} ms {case.flop / ms / 1e9:.0f} TFLOP/s", flush=True)

    def decode_sweep(self) -> None:
        print("\ndecode plans, tokens/warps/stages: us at " + ", ".join(map(str, DECODE_SWEEP)), flush=True)
        data = [(case, Paged(case, copies_of(case))) for case in DECODE_SWEEP]
        for plan in (DEFAULT_PLAN, *DECODE_PLANS):
            if self.late():
                print("no time for the rest", flush=True)
                break
            cells = []
            for case, paged in data:
                splits = choose_splits(case.pieces, KV_HEADS, case.context, self._sms)
                calls = paged.decode(splits, plan)
                error = paged.error(calls[0])
                ms = self.keep("decode", case, measure(calls), splits=splits, plan=asdict(plan), error=error)
                cells.append(f"{ms * 1e3:.1f}" + verdict(error))
            print(f"{'/'.join(map(str, asdict(plan).values()))}   " + " ".join(cells), flush=True)


def verdict(error: float) -> str:
    """Empty where the result is right, not-a-numbers included among the wrong."""
    return "" if error < TOLERANCE else f" WRONG by {error:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=65, help="no new plan is tried after that many")
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds)
    warnings.simplefilter("ignore")  # torch's, on kernels that refuse
    with torch.inference_mode():
        copy, product = ceilings()
        print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, bf16 product {product:.0f} TFLOP/s", flush=True)
        if arguments.pictures:
            picture_attention.table(bench.late)
            return 0
        bench.decode()
        bench.prefill()
        bench.prefill_sweep()
        bench.decode_sweep()
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "attention.json").write_text(json.dumps(bench.lines, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
