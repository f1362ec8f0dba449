"""The engine's kernels on one GPU, at the shapes of InternVL3-8B, in bfloat16 (`make bench NAME=kernels`).

Prints the copy speed first (the ceiling), then a row for each kernel, shape and number of rows: microseconds of the
kernel and of torch's way, GB/s over the fewest bytes that must move, and the error against the torch twin on poisoned
memory. Ways take turns, each in a CUDA graph over more copies of its weights than any cache holds.

    elementwise    norm, activation, rotary embedding with the write to the cache
    skinny         products of few rows in bfloat16, and the gate-up product with its activation (`gate_up*`)
    w4a16          the same with 4-bit weights; figures `quant.w4a16.m*` (speed over cuBLAS, summed over four shapes)
    fp8            products in e4m3 for 96 and 256 rows, beside cuBLAS without scales
    layers         whole layers as the engine tunes them when it starts, beside FP8 and bfloat16; `quant.chosen.m*`

A layer runs between the kernels that stand before and behind it in a decoder layer (``InPlace``), and what those take
by themselves is taken off: so a layer pays for quantizing its activations, and has the credit of a neighbour's work
that it does. `make bench NAME=linear` is `w4a16 layers`. $OUT, a folder, gets every row.

    python loadtest/bench kernels --only elementwise skinny
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from figures import emit

from tessera.kernels import reference
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.fp8_rows import fp8_sums, quantize_rows, quantize_weight
from tessera.kernels.norm import add_rms_norm
from tessera.kernels.operands import PagedCache, finished
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.skinny_linear import skinny_fp8, skinny_gate_up, skinny_unfinished
from tessera.kernels.tuning import MeasuredChoices, graph_milliseconds
from tessera.kernels.w4_layout import PackedW4
from tessera.kernels.w4a16 import w4a16_gate_up, w4a16_linear
from tessera.linear.formats.fp8 import Fp8OnLoad
from tessera.linear.formats.gptq import Awq
from tessera.linear.scheme import Linear, LinearScheme, LinearShape, Place
from tessera.linear.tuning import InPlace, choose
from tessera.linear.unquantized import Unquantized

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 3584, 18944, 28, 4, 128
SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # n, k
PLACES: dict[str, Place] = {"qkv": "qkv", "o": "output", "gate_up": "gate_up", "down": "down"}
HEAD = (151680, 3584)
GATED = "gate_up*"  # with the activation; beside the sums, not in them
GROUP, CHUNK = 128, 64  # of 4-bit weights
ROWS, FP8_ROWS, CHOSEN_ROWS = (1, 16, 32, 64), (96, 256), (1, 16, 32, 64, 96, 256, 8192)
ROTATED = 256 << 20  # bytes of weights that take turns
LAUNCHES = 20
TOLERANCE = 1e-2  # of bfloat16 results, relative, in norm
CUDA = torch.device("cuda")

Call = Callable[[], Any]


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
    """A kernel at a shape. ``ways``: calls by name, ``ours`` among them; ``bytes``: the least that a call moves."""

    kernel: str
    shape: str
    rows: int
    ways: Mapping[str, list[Call]]
    bytes: int
    error: float

    def measure(self, stream: torch.cuda.Stream) -> dict[str, Any]:
        taken = in_turns(self.ways, stream)
        row = {"kernel": self.kernel, "shape": self.shape, "rows": self.rows}
        row |= {f"{way}_us": 1e6 * seconds for way, seconds in taken.items()}
        return row | {"gb_s": self.bytes / taken["ours"] / 1e9, "error": self.error}


def elementwise() -> Iterator[Case]:
    """Rows of 8192 come in four copies, more than the L2 cache holds; few rows are about latency."""
    for make, n in product((_norm, _silu, _rotary), (1, 64, 8192)):
        made = [make(n) for _ in range(4 if n == 8192 else 1)]
        calls = [call for call, _, _ in made] * (1 if n == 8192 else LAUNCHES)
        yield Case(make.__name__.strip("_"), "", n, {"ours": calls}, made[0][1], max(wrong for *_, wrong in made))


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
    return finished(skinny_unfinished(x, weight))


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


def layers_of(shape: LinearShape, scheme: Callable[[], LinearScheme]) -> list[Linear]:
    """As many as make up the bytes that take turns, with 4 bits a weight."""
    generator = torch.Generator("cuda").manual_seed(4)
    layers = []
    for _ in range(-(-2 * ROTATED // (shape.outputs * shape.inputs))):
        made, modules = scheme(), {"w": slice(0, shape.outputs)}
        layers.append(Linear(shape.inputs, modules, shape.bias, lambda names, made=made: made, shape.dtype, CUDA))
        layers[-1].randomize(generator)
    return layers


def layers(stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    """One row a shape and number of rows, in microseconds: cuBLAS alone and in its place, FP8 alone, and the way that
    layers of 4-bit weights chose."""
    choices = MeasuredChoices(Path(mkdtemp()) / "choices.json", graph_milliseconds)
    schemes: dict[str, Callable[[], LinearScheme]] = {
        "in_place": Unquantized,
        "fp8": Fp8OnLoad,
        "chosen": partial(Awq, GROUP),
    }
    for name, (n, k) in SHAPES.items():
        shape = LinearShape(n, k, name == "qkv", PLACES[name], torch.bfloat16)
        kinds = {kind: layers_of(shape, scheme) for kind, scheme in schemes.items()}
        for kind in ("fp8", "chosen"):
            choose(kinds[kind], shape, choices, "here")
        for m in CHOSEN_ROWS:
            x, place = normal(m, k), Neighbours(shape, m, CUDA)
            timed: dict[str, list[Call]] = {"cublas": [partial(layer, x) for layer in kinds["in_place"]]}
            for kind, of_kind in kinds.items():
                calls = of_kind * -(-8 // len(of_kind))
                timed[kind] = [partial(place.run, layer) for layer in calls]
                timed[f"beside {kind}"] = [partial(place.without, of_kind[0].wants_fp8_input(m))] * len(calls)
            taken = {way: 1e6 * each for way, each in in_turns(timed, stream).items()}
            row = {kind: taken[kind] - taken[f"beside {kind}"] for kind in kinds}
            ways = {f"{kind}_way": _way(kinds[kind][0], m) for kind in ("fp8", "chosen")}
            yield {"kernel": "layers", "shape": name, "rows": m, "cublas": taken["cublas"]} | row | ways


class Neighbours(InPlace):
    """A place whose neighbours can run without a layer."""

    def without(self, fp8: bool) -> object:
        """What ``run`` would take without a layer: the kernel before it and the one after it as beside plain weights.

        ``fp8``: still the activation after gate_up quantizes, since that is for down.
        """
        self._before(False)
        if self._place == "gate_up":
            return self._activation(self._y, fp8)
        if self._place in ("output", "down"):
            return self._norm(self._y, self._residual)
        return self._rotate(self._y) if self._place == "qkv" else None

    @cached_property
    def _y(self) -> torch.Tensor:
        return self._normal(self._rows, self._shape.outputs)


def _way(layer: Linear, m: int) -> str:
    return layer.scheme.way(layer, m)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "elementwise": elementwise, "skinny": skinny, "w4a16": w4a16, "fp8": fp8,
}  # fmt: skip


def sums(rows: list[dict[str, Any]], way: str) -> dict[int, float]:
    """Microseconds of a way by number of rows, summed over the four shapes."""
    of_four = [row for row in rows if row["shape"] in SHAPES]
    return {m: sum(row[way] for row in of_four if row["rows"] == m) for m in dict.fromkeys(r["rows"] for r in of_four)}


def report(group: str, rows: list[dict[str, Any]]) -> None:
    """The figures of the products of quantized weights."""
    if group == "w4a16":
        cublas, ours = sums(rows, "cublas_us"), sums(rows, "ours_us")
        for m in ROWS:
            emit(f"quant.w4a16.m{m}", round(cublas[m] / ours[m], 3), "x", microseconds=round(ours[m], 1))
    if group == "layers":
        by = {way: sums(rows, way) for way in ("cublas", "in_place", "fp8", "chosen")}
        for m in CHOSEN_ROWS:
            cublas, in_place, fp8_alone, chosen = (by[way][m] for way in by)
            notes = {"fp8_alone": round(cublas / fp8_alone, 3), "over_bf16_in_place": round(in_place / chosen, 3)}
            emit(f"quant.chosen.m{m}", round(cublas / chosen, 3), "x", **notes)


def told(row: dict[str, Any]) -> str:
    cells = (f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
    return "  ".join(cells) + " WRONG" * (not row.get("error", 0.0) < TOLERANCE)


Group = Callable[[torch.cuda.Stream], Iterator[dict[str, Any]]]
GROUPS: dict[str, Group] = {
    name: lambda stream, cases=cases: (case.measure(stream) for case in cases()) for name, cases in CASES.items()
} | {"layers": layers}


def run(about: str, groups: Mapping[str, Group], default: list[str]) -> int:
    """The program of these groups: prints their rows, reports, and leaves all rows in $OUT."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=groups, default=default, help="(%(default)s)")
    options = parser.parse_args()
    program = Path(sys.argv[0]).name
    if not torch.cuda.is_available():
        sys.exit(f"bench {program}: needs a GPU, and this machine has none")
    warnings.simplefilter("ignore")  # torch's, on kernels that refuse
    torch.manual_seed(4)
    stream = torch.cuda.Stream()
    kept: list[dict[str, Any]] = []
    with torch.inference_mode():
        copy, multiply = machine_speeds(stream)
        print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s, bf16 product {multiply:.0f} TFLOP/s", flush=True)
        for group in options.only:
            rows = []
            for row in groups[group](stream):
                print(told(row), flush=True)
                rows.append(row)
            report(group, rows)
            kept += rows
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"{program}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return 0


def main() -> int:
    return run(str(__doc__), GROUPS, ["w4a16", "layers"] if Path(sys.argv[0]).name == "linear" else [*CASES])


if __name__ == "__main__":
    raise SystemExit(main())
