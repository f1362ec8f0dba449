"""The engine's elementwise kernels and skinny products on one GPU, at the shapes of InternVL3-8B, in bfloat16.

Prints the copy speed first (the ceiling), then each kernel's GB/s over the fewest bytes it must move, and its error
against its torch twin on poisoned memory. For the skinny products a sweep over plans follows: cuBLAS, the plan that
``plan_skinny`` picks, and the best one found. Under a minute and a half; $OUT, a folder, gets every measurement.

    PYTHONPATH=python_backends python loadtest/bench kernels [--seconds 80]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tessera.kernels import reference
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.norm import add_rms_norm
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.skinny_linear import (
    SkinnyPlan,
    padded_rows,
    plan_skinny,
    plan_skinny_gate_up,
    skinny_gate_up,
    skinny_linear,
)

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 3584, 18944, 28, 4, 128
LINEARS = {  # n, k
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "down": (3584, 18944),
    "gate_up": (37888, 3584),
    "head": (151680, 3584),
}
GATE_UP = "gate_up*"  # with the activation
ROWS = (1, 16, 32, 64)
TILES = [  # block_n, block_k, warps, stages
    *((16, 256, 2, 4), (16, 512, 4, 4), (32, 128, 4, 5), (32, 256, 4, 4), (32, 256, 4, 6), (64, 64, 4, 6)),
    *((64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 3), (64, 256, 4, 4), (128, 64, 4, 4), (128, 64, 4, 6)),
    *((128, 64, 8, 4), (128, 128, 4, 3), (128, 128, 8, 4), (256, 64, 8, 4)),
]
SPLITS = (1, 2, 3, 4, 6, 8, 12)
SHARED_MEMORY = 227 * 1024
LAUNCHES = 20
TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm

Call = Callable[[], Any]


def seconds(calls: list[Call], stream: torch.cuda.Stream) -> float:
    """Median time of one of the calls, which run one after the other in a CUDA graph."""
    return in_turns({"": calls}, stream)[""]


def in_turns(ways: Mapping[str, list[Call]], stream: torch.cuda.Stream) -> dict[str, float]:
    """The same of several ways, whose graphs take turns: what the clocks do meanwhile falls on all of them."""
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
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def copy_speed(stream: torch.cuda.Stream) -> float:
    """Bytes a second, read and written."""
    source = normal(1 << 30)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)], stream)


# --- elementwise


def norm_case(n: int) -> tuple[Call, int, float]:
    """One call, the bytes it must move, and its error."""
    x, residual, weight = normal(n, HIDDEN), normal(n, HIDDEN), normal(HIDDEN)
    expected = torch.cat(reference.add_rms_norm(x, residual.clone(), weight, 1e-6))
    with poisoned():
        actual = torch.cat(add_rms_norm(x, residual.clone(), weight, 1e-6))
    return lambda: add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes + weight.nbytes, error(actual, expected)


def silu_case(n: int) -> tuple[Call, int, float]:
    gate_up = normal(n, 2 * FEED_FORWARD)
    expected = reference.silu_and_multiply(gate_up)
    with poisoned():
        actual = silu_and_multiply(gate_up)
    return lambda: silu_and_multiply(gate_up), gate_up.nbytes * 3 // 2, error(actual, expected)


def rotate_case(n: int) -> tuple[Call, int, float]:
    qkv = normal(n, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    angles = torch.rand((n, HEAD_DIM // 2), device="cuda") * 100
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros((2, n // 16 + 1, 16, KV_HEADS, HEAD_DIM), dtype=qkv.dtype, device="cuda")
    slots = torch.randperm(cache.shape[1] * 16, device="cuda")[:n]
    slots[3::7] = -1
    results = []
    for rotate in (rotate_and_store, reference.rotate_and_store):
        rows, (keys, values) = qkv.clone(), cache.clone()
        rotate(rows, cos, sin, slots, keys, values, HEADS)
        results.append(torch.cat([rows.flatten(), keys.flatten(), values.flatten()]))
    slots = torch.randperm(cache.shape[1] * 16, device="cuda")[:n]
    row_bytes = (2 * HEADS + 5 * KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4 + 8
    call = partial(rotate_and_store, qkv, cos, sin, slots, cache[0], cache[1], HEADS)
    return call, n * row_bytes, error(*results)


def elementwise(stream: torch.cuda.Stream) -> list[dict[str, Any]]:
    """Rows of 8192 come in four copies, more than the L2 cache holds; few rows are about latency."""
    rows = []
    for (name, case), n in product(
        (("add_rms_norm", norm_case), ("silu_and_multiply", silu_case), ("rotate_and_store", rotate_case)),
        (1, 64, 8192),
    ):
        cases = [case(n) for _ in range(4 if n == 8192 else 1)]
        calls = [call for call, _, _ in cases] * (1 if n == 8192 else LAUNCHES)
        taken, wrong = seconds(calls, stream), max(found for _, _, found in cases)
        rows.append({"kernel": name, "n": n, "us": taken * 1e6, "gb_s": cases[0][1] / taken / 1e9, "error": wrong})
    return rows


# --- skinny products


def plans(m: int, n: int, k: int, sms: int, most_splits: int) -> list[SkinnyPlan]:
    """Those worth a try: the tiles fit into the shared memory, and splits neither starve nor flood the GPU."""
    found = []
    for (block_n, block_k, warps, stages), splits in product(TILES, SPLITS):
        programs = -(-n // block_n) * splits
        if (
            k % block_k == 0
            and splits <= min(most_splits, k // block_k)
            and 2 * stages * block_k * (block_n + padded_rows(m)) <= SHARED_MEMORY
            and programs >= 0.8 * sms
            and (splits == 1 or programs <= 4.2 * sms)
        ):
            found.append(SkinnyPlan(block_n, block_k, splits, warps, stages))
    return found


class Product:
    """One weight's products with m rows: as many copies of the weight as the buffer holds, taken in turn."""

    def __init__(self, name: str, m: int, buffer: torch.Tensor, sms: int) -> None:
        self.name, self.m, gated = name, m, name == GATE_UP
        n, k = LINEARS[name.rstrip("*")]
        self.weights = [buffer[start : start + n * k].view(n, k) for start in range(0, len(buffer) - n * k + 1, n * k)]
        self.x = normal(m, k) / k**0.5
        self.kernel = skinny_gate_up if gated else skinny_linear
        self.library = (lambda x, w: silu_and_multiply(F.linear(x, w))) if gated else F.linear
        self.plan = plan_skinny_gate_up(m, n // 2, k, sms) if gated else plan_skinny(m, n, k, sms)
        self.plans = list(dict.fromkeys([self.plan, *plans(m, n, k, sms, 1 if gated else max(SPLITS))]))
        self.bytes = 2 * (n * k + m * k + m * (n // 2 if gated else n))
        self.twin = reference.skinny_gate_up if gated else reference.skinny_linear

    def compile(self, plan: SkinnyPlan) -> None:
        self.kernel(self.x, self.weights[0], plan=plan)

    def speed(self, function: Callable[..., torch.Tensor], stream: torch.cuda.Stream) -> float:
        """GB/s"""
        calls = [partial(function, self.x, weight) for weight in self.weights]
        return self.bytes / seconds(calls * -(-4 // len(calls)), stream) / 1e9

    def error(self, plan: SkinnyPlan, expected: torch.Tensor) -> float:
        with poisoned():
            return error(self.kernel(self.x, self.weights[-1], plan=plan), expected)


def sweep(stream: torch.cuda.Stream, deadline: float) -> Iterator[dict[str, Any]]:
    """One measurement each of cuBLAS and of every plan, until the deadline."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    buffer = normal(151680 * 3584)
    for rows in sorted({padded_rows(m) for m in ROWS}):
        products = [
            Product(name, m, buffer, sms)
            for m, name in product([m for m in ROWS if padded_rows(m) == rows], (*LINEARS, GATE_UP))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of a compilation runs outside the interpreter lock
            list(pool.map(lambda job: job[0].compile(job[1]), [(p, plan) for p in products for plan in p.plans]))
        for one in products:
            key = {"product": one.name, "m": one.m}
            yield {**key, "by": "cuBLAS", "gb_s": one.speed(one.library, stream)}
            expected = one.twin(one.x, one.weights[-1])
            for plan in one.plans:
                if time.monotonic() > deadline:
                    return
                speed = one.speed(partial(one.kernel, plan=plan), stream)
                by = "default" if plan == one.plan else "plan"
                yield {**key, "by": by, "gb_s": speed, "error": one.error(plan, expected), **asdict(plan)}


def short(row: dict[str, Any]) -> str:
    plan = "{block_n:3}x{block_k:<3} splits {splits:<2} warps {warps} stages {stages}".format(**row)
    return f"{row['gb_s']:5.0f}  {plan}"


def print_sweep(found: list[dict[str, Any]]) -> None:
    print("\nGB/s of skinny products (gate_up* with the activation); the two best right plans")
    for name, m in dict.fromkeys((row["product"], row["m"]) for row in found):
        of_this = [row for row in found if (row["product"], row["m"]) == (name, m)]
        speeds = {row["by"]: f"{row['gb_s']:5.0f}" for row in of_this}
        tried = [row for row in of_this if row["by"] != "cuBLAS"]
        right = sorted((row for row in tried if row["error"] < TOLERANCE), key=lambda row: -row["gb_s"])
        wrong = f", {len(tried) - len(right)} WRONG" if len(right) < len(tried) else ""
        best = " | ".join(short(row) for row in right[:2])
        by = f"cuBLAS {speeds['cuBLAS']}  default {speeds.get('default', '    -')}"
        print(f"{name:8} m {m:2}  {by}  best of {len(tried)}{wrong}: {best}")
    print(f"largest error {max((row['error'] for row in found if 'error' in row), default=float('nan')):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80, help="the sweep stops after this many, from the start")
    deadline = time.monotonic() + parser.parse_args().seconds
    if not torch.cuda.is_available():
        sys.exit("kernels needs a GPU")
    torch.manual_seed(4)
    stream = torch.cuda.Stream()
    with torch.inference_mode():
        ceiling = copy_speed(stream) / 1e9
        print(f"{torch.cuda.get_device_name()}: copy {ceiling:.0f} GB/s")
        rows = elementwise(stream)
        for row in rows:
            print("{kernel:18} n {n:5}  {us:8.1f} us  {gb_s:6.0f} GB/s  error {error:.1e}".format(**row), flush=True)
        found = list(sweep(stream, deadline))
    print_sweep(found)
    if time.monotonic() > deadline:
        print("stopped by --seconds: some plans were not measured")
    if "OUT" in os.environ:
        lines = [json.dumps({"copy_gb_s": ceiling}), *map(json.dumps, rows + found)]
        Path(os.environ["OUT"], "kernels.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
