"""The engine's kernels on one GPU, at the shapes of InternVL3-8B, in bfloat16 (`make bench NAME=kernels`).

Prints the copy speed first (the ceiling), then a row for each kernel, shape and number of rows: microseconds of the
kernel and of torch's way, GB/s over the fewest bytes that must move, and the error against the torch twin on poisoned
memory. Ways take turns, each in a CUDA graph over more copies of its weights than a cache holds. $OUT gets all rows.

    elementwise    norm, activation, rotary embedding with the write to the cache, the likeliest of logits
    skinny         products of few rows in bfloat16, and the gate-up product with its activation (`gate_up*`)
    rows           products of any number of rows whose bits are a row's own, those of the vision tower too
    w4a16          the same with 4-bit weights; figures `quant.w4a16.m*` (speed over cuBLAS, summed over four shapes)
    fp8            products in e4m3 for 96 and 256 rows, beside cuBLAS without scales
    experts        a layer's routing and products, of Qwen3-30B-A3B's shape, beside torch's grouped ones in bfloat16
    decode         attention of one token each, by batch and context, from caches whose blocks lie in random order
    prefill        attention of many, beside torch's own on contiguous keys; TFLOP/s over what the causal mask leaves

    python loadtest/bench kernels --only elementwise skinny
"""

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import emit
from torch.nn.attention.bias import causal_lower_right

from tessera.kernels import reference
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.experts import grouped_down, grouped_gate_up, route
from tessera.kernels.fp8_rows import Fp8Rows, fp8_sums, quantize_rows, quantize_weight
from tessera.kernels.likeliest import likeliest
from tessera.kernels.norm import add_rms_norm
from tessera.kernels.operands import PagedCache, finished
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.row_linear import row_linear
from tessera.kernels.skinny_linear import skinny_deferred, skinny_fp8, skinny_gate_up
from tessera.kernels.varlen_prefill import default_plan, prefill_attention, prefill_tiles
from tessera.kernels.w4_layout import PackedW4
from tessera.kernels.w4a16 import w4a16_gate_up, w4a16_linear

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 3584, 18944, 28, 4, 128
TOWER = {"vit qkv": (3072, 1024), "vit output": (1024, 1024), "vit fc1": (4096, 1024), "vit fc2": (1024, 4096)}
SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # n, k
HEAD = (151680, 3584)
GATED = "gate_up*"  # with the activation; beside the sums, not in them
GROUP, CHUNK = 128, 64  # of 4-bit weights
ROWS, FP8_ROWS, ANY_ROWS = (1, 16, 32, 64), (96, 256), (10, 64, 2528, 8192)
EXPERTS, PICKED, EXPERT_HIDDEN, EXPERT_SIZE = 128, 8, 2048, 768
EXPERT_ROWS = (1, 10, 64, 256, 1024, 8192)
DECODES = [(pieces, 1, context) for context in (450, 2400) for pieces in (1, 10, 64, 256)]
PREFILLS = [(26, 316, 316), (4, 1852, 1852), (3, 2364, 2364), (8, 2300, 2300), (1, 512, 4608)]
"""Sequences, the new tokens of each, and the context that ends with those."""
BLOCK, QUERIES, SCALE = 16, HEADS // KV_HEADS, HEAD_DIM**-0.5
ROTATED = 256 << 20  # bytes of weights that take turns
LAUNCHES = 20
TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm
CUDA = torch.device("cuda")

Call = Callable[..., Any]


def in_turns(ways: Mapping[str, list[Call]], stream: torch.cuda.Stream) -> dict[str, float]:
    """Median seconds of one of each way's calls, which run one after the other in a CUDA graph; the graphs take turns,
    so that what the clocks do meanwhile falls on all of them."""
    torch.cuda.synchronize()  # the operands were made on another stream
    graphs = {}
    with torch.cuda.stream(stream):
        for way, calls in ways.items():
            calls[0]()  # compiled before the capture
            stream.synchronize()
            graphs[way] = torch.cuda.CUDAGraph()
            graphs[way].capture_begin()
            for call in calls:
                call()
            graphs[way].capture_end()
            graphs[way].replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(9 * len(graphs) + 1)]
        marks[0].record()
        for mark, graph in zip(marks[1:], 9 * [*graphs.values()]):
            graph.replay()
            mark.record()
        stream.synchronize()
    taken = [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
    return {way: statistics.median(taken[place :: len(graphs)]) / len(ways[way]) for place, way in enumerate(graphs)}


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds not-a-numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in norm; not-a-number where a result is one."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=CUDA)


def machine_speeds(stream: torch.cuda.Stream) -> tuple[float, float]:
    """GB/s of a copy, both directions counted, and TFLOP/s of a bf16 product of two 8,192-square matrices."""
    source = normal(1 << 30)
    target, a, b = torch.empty_like(source), normal(8192, 8192), normal(8192, 8192)
    ways = {"copy": [lambda: torch.neg(source, out=target)] * 3, "product": [lambda: torch.mm(a, b)] * 4}
    taken = in_turns(ways, stream)
    return 2 * source.nbytes / taken["copy"] / 1e9, 2 * 8192**3 / taken["product"] / 1e12


@dataclass(frozen=True)
class Case:
    """A kernel at a shape. ``ways``: calls by name, ``ours`` among them; ``bytes``: the least that a call moves;
    ``flop``: what it has to compute, where that is what takes the time."""

    kernel: str
    shape: str
    rows: int
    ways: Mapping[str, list[Call]]
    bytes: int
    error: float
    flop: int = 0

    def measure(self, stream: torch.cuda.Stream) -> dict[str, Any]:
        taken = in_turns(self.ways, stream)
        row = {"kernel": self.kernel, "shape": self.shape, "rows": self.rows}
        row |= {f"{way}_us": 1e6 * seconds for way, seconds in taken.items()}
        rate = {"tflop_s": self.flop / 1e12} if self.flop else {"gb_s": self.bytes / 1e9}
        return row | {name: each / taken["ours"] for name, each in rate.items()} | {"error": self.error}


def elementwise() -> Iterator[Case]:
    """Rows of 8192 come in four copies, more than the L2 cache holds; few rows are about latency."""
    for make, n in product((_norm, _silu, _rotary), (1, 64, 8192)):
        made = [make(n) for _ in range(4 if n == 8192 else 1)]
        calls = [call for call, _, _ in made] * (1 if n == 8192 else LAUNCHES)
        yield Case(make.__name__.strip("_"), "", n, {"ours": calls}, made[0][1], max(wrong for *_, wrong in made))
    for n in (1, 10, 64):
        logits = normal(n, HEAD[0])
        with poisoned():
            wrong = float((likeliest(logits) != reference.likeliest(logits)).sum())
        ways = {"torch": reference.likeliest, "ours": likeliest}
        calls = {name: [partial(way, logits)] * LAUNCHES for name, way in ways.items()}
        yield Case("likeliest", "", n, calls, logits.nbytes, wrong)


def _norm(n: int) -> tuple[Call, int, float]:
    """One call, the bytes it must move, and its error."""
    x, residual, weight = normal(n, HIDDEN), normal(n, HIDDEN), normal(HIDDEN)
    expected = torch.cat(reference.add_rms_norm(x, residual.clone(), weight, 1e-6))
    with poisoned():
        actual = torch.cat(add_rms_norm(x, residual.clone(), weight, 1e-6))
    return lambda: add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes + weight.nbytes, error(actual, expected)


def _silu(n: int) -> tuple[Call, int, float]:
    gate_up = normal(n, 2 * FEED_FORWARD)
    with poisoned():
        wrong = error(silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up))
    return lambda: silu_and_multiply(gate_up), gate_up.nbytes * 3 // 2, wrong


def _rotary(n: int) -> tuple[Call, int, float]:
    qkv = normal(n, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    angles = torch.rand((n, HEAD_DIM // 2), device=CUDA) * 100
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros((2, n // 16 + 1, 16, KV_HEADS, HEAD_DIM), dtype=qkv.dtype, device=CUDA)
    slots = torch.randperm(cache.shape[1] * 16, device=CUDA)[:n]
    slots[3::7] = -1
    results = []
    for rotate in (rotate_and_store, reference.rotate_and_store):
        rows, stored = qkv.clone(), PagedCache(*cache.clone())
        rotate(rows, cos, sin, slots, stored, HEADS)
        results.append(torch.cat([rows.flatten(), stored.keys.flatten(), stored.values.flatten()]))
    slots = torch.randperm(cache.shape[1] * 16, device=CUDA)[:n]
    row_bytes = (2 * HEADS + 5 * KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4 + 8
    call = partial(rotate_and_store, qkv, cos, sin, slots, PagedCache(*cache), HEADS)
    return call, n * row_bytes, error(*results)


def _copies(each_bytes: int) -> range:
    return range(max(4, -(-ROTATED // each_bytes)))


def _product(
    kernel: str, shape: str, x: Any, weights: list[Any], library: list[Call], ways: tuple[Any, Any], moved: int
) -> Case:
    """``ways``: the kernel and its twin, each of (x, weight)."""
    ours, twin = ways
    with poisoned():
        wrong = error(ours(x, weights[-1]), twin(x, weights[-1]))
    rows = len(x.values) if hasattr(x, "_fields") else len(x)
    calls = {"cublas": library, "ours": [partial(ours, x, weight) for weight in weights]}
    return Case(kernel, shape, rows, calls, moved, wrong)


def _gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_and_multiply(F.linear(x, weight))


def skinny() -> Iterator[Case]:
    for name, (n, k) in {**SHAPES, "head": HEAD, GATED: SHAPES["gate_up"]}.items():
        weights = [normal(n, k) * 0.02 for _ in _copies(2 * n * k)]
        gated = name == GATED
        ways = (skinny_gate_up, reference.skinny_gate_up) if gated else (_skinny_linear, F.linear)
        for m in ROWS:
            x = normal(m, k)
            library = [partial(_gated if gated else F.linear, x, weight) for weight in weights]
            yield _product("skinny", name, x, weights, library, ways, 2 * (n * k + m * (k + n // (1 + gated))))


def _skinny_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return finished(skinny_deferred(x, weight))


def rows() -> Iterator[Case]:
    for (name, (n, k)), m in product({**SHAPES, **TOWER}.items(), ANY_ROWS):
        x, weights = normal(m, k), [normal(n, k) * 0.02 for _ in _copies(2 * n * k)]
        library = [partial(F.linear, x, weight) for weight in weights]
        case = _product("rows", name, x, weights, library, (row_linear, F.linear), 2 * (n * k + m * (k + n)))
        yield replace(case, flop=2 * m * n * k if m > 64 else 0)


def w4a16() -> Iterator[Case]:
    for name, (n, k) in {**SHAPES, GATED: SHAPES["gate_up"]}.items():
        weights = [random_w4(n, k) for _ in _copies(n * k // 2)]
        halves = [normal(n, k) * 0.02 for _ in _copies(2 * n * k)]
        gated = name == GATED
        ways = (w4a16_gate_up, reference.w4a16_gate_up) if gated else (w4a16_linear, reference.w4a16_linear)
        packed = weights[0].codes.nbytes + weights[0].words.nbytes
        for m in ROWS:
            x = normal(m, k)
            library = [partial(_gated if gated else F.linear, x, weight) for weight in halves]
            yield _product("w4a16", name, x, weights, library, ways, packed + 2 * m * (k + n // (1 + gated)))


def random_w4(n: int, k: int) -> PackedW4:
    """Weights of about 0.02, zero points of 0 .. 15."""
    codes = torch.randint(-(1 << 15), 1 << 15, (k // (4 * CHUNK), n, CHUNK), dtype=torch.int16, device=CUDA)
    scales = torch.rand((k // GROUP, n), device=CUDA) * 0.005 + 0.001
    words = scales.view(torch.int32) & -32 | torch.randint(0, 16, scales.shape, dtype=torch.int32, device=CUDA)
    return PackedW4(codes, words, torch.zeros(n, dtype=torch.int32, device=CUDA))


def fp8() -> Iterator[Case]:
    def ours(x: Any, weight: Any) -> torch.Tensor:
        return skinny_fp8(x, *weight, None, torch.bfloat16)

    def twin(x: Any, weight: Any) -> torch.Tensor:
        return reference.skinny_fp8(x, *weight, None, torch.bfloat16)

    for name, (n, k) in SHAPES.items():
        weights = [quantize_weight(normal(n, k) * 0.02) for _ in _copies(n * k)]
        for m in FP8_ROWS:
            x = quantize_rows(normal(m, k))
            library = [partial(fp8_sums, x, weight, torch.bfloat16) for weight, _ in weights]
            yield _product("fp8", name, x, weights, library, (ours, twin), n * k + m * (k + 2 * n))


def experts() -> Iterator[Case]:
    """Bytes are those of the experts that see a token."""
    gate_up, down = (2 * EXPERT_SIZE, EXPERT_HIDDEN), (EXPERT_HIDDEN, EXPERT_SIZE)
    halves = [tuple(normal(EXPERTS * n, k) * 0.02 for n, k in (gate_up, down)) for _ in range(2)]
    fours = [tuple(random_w4(EXPERTS * n, k) for n, k in (gate_up, down)) for _ in range(2)]
    eights = [tuple(Fp8Rows(*quantize_rows(weight)) for weight in pair) for pair in halves]
    for form, weights, size in (("bf16", halves, 2.0), ("e4m3", eights, 1.0), ("4 bits", fours, 0.5)):
        rows = quantize_rows if form == "e4m3" else lambda x: x
        for m in EXPERT_ROWS:
            x, logits = normal(m, EXPERT_HIDDEN), normal(m, EXPERTS)
            with poisoned():
                wrong = _error_of_experts(rows, x, logits, *weights[-1])
            touched = int((route(logits, PICKED, True).bounds.diff() > 0).sum())
            moved = int(touched * size * 3 * EXPERT_SIZE * EXPERT_HIDDEN) + 2 * m * EXPERT_HIDDEN * (1 + PICKED)
            library = [partial(_torch_experts, x, logits, *pair) for pair in halves]
            calls = {"grouped_mm": library, "ours": [partial(_experts, rows, x, logits, *pair) for pair in weights]}
            flop = 6 * m * PICKED * EXPERT_SIZE * EXPERT_HIDDEN if m >= 1024 else 0
            yield Case("experts", form, m, calls, moved, wrong, flop)


def _experts(rows: Call, x: torch.Tensor, logits: torch.Tensor, gates: Any, downs: Any) -> torch.Tensor:
    routing = route(logits, PICKED, True)
    return grouped_down(rows(grouped_gate_up(rows(x), gates, routing)), downs, routing).product()


def _error_of_experts(rows: Call, x: torch.Tensor, logits: torch.Tensor, gates: Any, downs: Any) -> float:
    """The larger of both products'."""
    routing = reference.route(logits, PICKED, True)
    gated = reference.grouped_gate_up(rows(x), gates, routing)
    summed = (down(rows(gated), downs, routing).product() for down in (grouped_down, reference.grouped_down))
    return max(error(grouped_gate_up(rows(x), gates, routing), gated), error(*summed))


def _torch_experts(x: torch.Tensor, logits: torch.Tensor, gates: torch.Tensor, downs: torch.Tensor) -> torch.Tensor:
    """With our routing; the sum of a token's experts is a product too."""
    routing = route(logits, PICKED, True)
    gates, downs = (each.unflatten(0, (EXPERTS, -1)).mT for each in (gates, downs))
    product = torch._grouped_mm(x[routing.pairs // PICKED], gates, offs=routing.bounds[1:])
    of_pairs = torch._grouped_mm(silu_and_multiply(product), downs, offs=routing.bounds[1:])
    places = torch.empty_like(routing.pairs)
    places[routing.pairs] = torch.arange(len(places), dtype=places.dtype, device=CUDA)
    return torch.bmm(routing.weights[:, None], of_pairs[places].view(len(x), PICKED, -1))[:, 0]


class Paged:
    """Random queries of ``pieces`` sequences, ``count`` of each, and caches of their contexts, whose blocks lie in
    random order and hold not-a-numbers behind a context. There are copies, so that none is read from the L2 cache."""

    def __init__(self, pieces: int, count: int, context: int) -> None:
        self.pieces, self.count, self.context = pieces, count, context
        self.kv_bytes = pieces * context * 2 * KV_HEADS * HEAD_DIM * 2
        most = -(-context // BLOCK)
        copies = min(128, len(_copies(self.kv_bytes)))
        self.caches = normal(copies, 2, pieces * most, BLOCK, KV_HEADS, HEAD_DIM)
        order = torch.randperm(pieces * most, device=CUDA, dtype=torch.int32)
        self.blocks = order.view(pieces, most).T.contiguous()
        self.caches[:, :, self.blocks[-1].long(), context - (most - 1) * BLOCK :] = float("nan")
        self.q = normal(pieces * count, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
        self.out = torch.empty(self.q.shape, dtype=self.q.dtype, device=CUDA)
        self.counts, self.contexts = np.full(pieces, count), np.full(pieces, context)
        arrays = (np.arange(pieces) * count, self.counts, self.contexts)
        self.columns = [torch.from_numpy(each.astype(np.int32)).to(CUDA) for each in arrays]

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
    plan = default_plan(HEAD_DIM, torch.bfloat16)
    for pieces, count, context in PREFILLS:
        data = Paged(pieces, count, context)
        tiles = torch.from_numpy(prefill_tiles(data.counts, data.contexts, plan.rows // QUERIES)).to(CUDA)
        where = (*data.columns, data.blocks, tiles, SCALE, data.out, plan)
        calls: list[Call] = [partial(prefill_attention, data.q, PagedCache(*each), *where) for each in data.caches]
        operands = (normal(pieces, heads, n, HEAD_DIM) for heads, n in ((HEADS, count), *[(KV_HEADS, context)] * 2))
        mask = {"is_causal": True} if count == context else {"attn_mask": causal_lower_right(count, context)}
        torchs: Call = partial(F.scaled_dot_product_attention, *operands, scale=SCALE, enable_gqa=True, **mask)
        seen = count * (context - count) + count * (count + 1) // 2
        ways = {"ours": calls, "torch": [torchs] * len(calls)}
        flop = 4 * pieces * seen * HEADS * HEAD_DIM
        yield Case("prefill", f"{count} of {context}", pieces, ways, data.kv_bytes, data.error(calls[0]), flop)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "elementwise": elementwise, "skinny": skinny, "rows": rows, "w4a16": w4a16, "fp8": fp8, "experts": experts,
    "decode": decode, "prefill": prefill,
}  # fmt: skip


def report(rows: list[dict[str, Any]]) -> None:
    """The figures of products of 4-bit weights: of both ways, the microseconds summed over the four shapes."""
    of_four = [row for row in rows if row["kernel"] == "w4a16" and row["shape"] in SHAPES]
    for m in ROWS if of_four else ():
        cublas, ours = (sum(row[way] for row in of_four if row["rows"] == m) for way in ("cublas_us", "ours_us"))
        emit(f"quant.w4a16.m{m}", round(cublas / ours, 3), "x", microseconds=round(ours, 1))


def told(row: dict[str, Any]) -> str:
    cells = (f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
    return "  ".join(cells) + " WRONG" * (not row["error"] < TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[*GROUPS], help="(%(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels: needs a GPU, and this machine has none")
    warnings.simplefilter("ignore")  # torch's, on kernels that refuse
    torch.manual_seed(4)
    stream, rows = torch.cuda.Stream(), []
    with torch.inference_mode():
        copy, multiply = machine_speeds(stream)
        print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, bf16 product {multiply:.0f} TFLOP/s", flush=True)
        for case in (case for group in options.only for case in GROUPS[group]()):
            rows.append(case.measure(stream))
            print(told(rows[-1]), flush=True)
    report(rows)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "kernels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0
