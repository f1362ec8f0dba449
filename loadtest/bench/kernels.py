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
    prefill        attention of many, beside torch's own on contiguous keys; TFLOP/s over what the causal mask leaves;
                   `short_us` by the tiles of steps in graphs

    python loadtest/bench kernels --only elementwise skinny
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from figures import emit

from bench.kernel_case import CUDA, Call, Case, copies, error, machine_speeds, normal, poisoned
from bench.paged_cases import HEAD_DIM, HEADS, KV_HEADS, decode, prefill
from tessera.kernels import reference
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.experts import grouped_down, grouped_gate_up, route
from tessera.kernels.fp8_rows import Fp8Rows, fp8_sums, quantize_rows, quantize_weight
from tessera.kernels.likeliest import likeliest
from tessera.kernels.norm import add_rms_norm
from tessera.kernels.operands import PagedCache, finished
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.row_linear import row_linear
from tessera.kernels.skinny_linear import skinny_deferred, skinny_fp8, skinny_gate_up
from tessera.kernels.w4_layout import PackedW4
from tessera.kernels.w4a16 import w4a16_gate_up, w4a16_linear

HIDDEN, FEED_FORWARD = 3584, 18944
TOWER = {"vit qkv": (3072, 1024), "vit output": (1024, 1024), "vit fc1": (4096, 1024), "vit fc2": (1024, 4096)}
SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # n, k
HEAD = (151680, 3584)
GATED = "gate_up*"  # with the activation; beside the sums, not in them
GROUP, CHUNK = 128, 64  # of 4-bit weights
ROWS, FP8_ROWS, ANY_ROWS = (1, 16, 32, 64), (96, 256), (10, 64, 2528, 8192)
EXPERTS, PICKED, EXPERT_HIDDEN, EXPERT_SIZE = 128, 8, 2048, 768
EXPERT_ROWS = (1, 10, 64, 256, 1024, 8192)
LAUNCHES = 20
TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm


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
        weights = [normal(n, k) * 0.02 for _ in copies(2 * n * k)]
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
        x, weights = normal(m, k), [normal(n, k) * 0.02 for _ in copies(2 * n * k)]
        library = [partial(F.linear, x, weight) for weight in weights]
        case = _product("rows", name, x, weights, library, (row_linear, F.linear), 2 * (n * k + m * (k + n)))
        yield replace(case, flop=2 * m * n * k if m > 64 else 0)


def w4a16() -> Iterator[Case]:
    for name, (n, k) in {**SHAPES, GATED: SHAPES["gate_up"]}.items():
        weights = [random_w4(n, k) for _ in copies(n * k // 2)]
        halves = [normal(n, k) * 0.02 for _ in copies(2 * n * k)]
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
        weights = [quantize_weight(normal(n, k) * 0.02) for _ in copies(n * k)]
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
