"""Linear layers of 4-bit weights on one GPU, at the shapes of InternVL3-8B, in bfloat16, group 128.

Prints the copy speed first (the ceiling), then for each shape and number of rows the time of cuBLAS in bfloat16 and of
the W4A16 kernel, each in a CUDA graph over more copies of the weights than any cache holds, their errors against the
torch twin, and the ratio of the sums over the four shapes. ``--sweep`` times many plans of the kernel instead, and with
``fp8`` those of our product in e4m3 for 96 and 256 rows, beside cuBLAS without scales; * is the plan that serves.

Then whole layers that have measured which way is the fastest, as the engine's do when it starts, beside layers in FP8
alone and in bfloat16 (cuBLAS). One rule for all three: a layer runs between the kernels that stand before and behind it
in a decoder layer (``InPlace``), and what those take by themselves beside plain weights is taken off. So a layer pays
for what quantizing its activations and applying its scales adds to its neighbours, each such cost is counted once, and
a kernel that does a neighbour's work as well is given that credit. cuBLAS alone, without neighbours, is printed too.
All of them take turns.

    PYTHONPATH=python_backends python loadtest/bench linear [--sweep [fp8]] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from figures import emit

from bench.kernels import Call, error, in_turns, normal, poisoned, seconds
from tessera.kernels import reference
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.fp8_rows import fp8_sums, quantize_rows, quantize_weight
from tessera.kernels.skinny_linear import SkinnyPlan, plan_skinny_fp8, skinny_fp8
from tessera.kernels.tuning import MeasuredChoices, graph_milliseconds
from tessera.kernels.w4_layout import PackedW4
from tessera.kernels.w4a16 import W4Plan, padded_rows, plan_w4a16, w4a16_gate_up, w4a16_linear
from tessera.linear.formats.awq import Awq
from tessera.linear.formats.fp8 import Fp8OnLoad
from tessera.linear.scheme import Linear, LinearScheme, LinearShape, Place
from tessera.linear.tuning import InPlace, MeasuredScheme
from tessera.linear.unquantized import Unquantized

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # n, k
PLACES: dict[str, Place] = {"qkv": "qkv", "o": "output", "gate_up": "gate_up", "down": "down"}
GATED = "gate_up*"  # with the activation; beside the sums, not in them
GROUP = 128
ROWS = (1, 16, 32, 64)
CHOSEN_ROWS = (1, 16, 32, 64, 96, 256, 8192)
CUDA = torch.device("cuda")
COMMAND = "make bench NAME=linear"
ROTATED = 256 << 20  # bytes of weights that take turns
TILES = [  # block_n, warps, stages
    *((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 4, 6), (128, 4, 2), (128, 4, 3), (128, 4, 4)),
    *((128, 8, 3), (128, 8, 4), (256, 8, 3)),
]
PROGRAMS = (1, 1.5, 2, 3, 4)  # a multiprocessor
SPLITS = (1, 2, 3, 4, 5, 7, 9)  # programs a tile
FP8_ROWS = (96, 256)
FP8_TILES = [  # block_m, block_n, warps: those that compile for Hopper without spilling registers
    *((32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 8), (64, 256, 8), (128, 64, 4), (128, 128, 8)),
    *((128, 256, 8), (256, 64, 4), (256, 64, 8), (256, 128, 8)),
]
FP8_COLUMNS = 128  # of a tile
FP8_STAGES = (3, 4, 5, 6)
FP8_SPLITS = (1, 2, 3, 4, 6, 8)
SHARED_MEMORY = 227 * 1024
TOLERANCE = 1e-2


def copy_speed(stream: torch.cuda.Stream) -> float:
    """Bytes a second, read and written, by the multiprocessors; in a graph a plain copy is slower."""
    source = normal(1 << 30)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: torch.neg(source, out=target)] * 3, stream)


def random_w4(n: int, k: int, chunk: int = 64) -> PackedW4:
    """Weights of about 0.02, zero points of 0 .. 15."""
    codes = torch.randint(-(1 << 15), 1 << 15, (k // (4 * chunk), n, chunk), dtype=torch.int16, device="cuda")
    scales = torch.rand((k // GROUP, n), device="cuda") * 0.005 + 0.001
    words = scales.view(torch.int32) & -32 | torch.randint(0, 16, scales.shape, dtype=torch.int32, device="cuda")
    return PackedW4(codes, words, torch.zeros(n, dtype=torch.int32, device="cuda"))


class Case:
    """One shape's products with m rows, by the W4A16 kernel and by cuBLAS in bfloat16."""

    by = "w4a16"

    def __init__(self, name: str, weights: list[PackedW4], m: int) -> None:
        self.name, self.m, self.weights = name, m, weights
        self.n, self.k = weights[0].shape
        self.x = normal(m, self.k)
        gated = name == GATED
        self.kernel: Callable[..., torch.Tensor] = w4a16_gate_up if gated else w4a16_linear
        self.twin = reference.w4a16_gate_up if gated else reference.w4a16_linear
        self.library = (lambda x, w: silu_and_multiply(F.linear(x, w))) if gated else F.linear
        self.bytes = weights[0].codes.nbytes + weights[0].words.nbytes + 2 * m * (self.k + self.n // (1 + gated))

    def library_calls(self) -> list[Call]:
        halves = [normal(self.n, self.k) * 0.02 for _ in range(-(-ROTATED // (2 * self.n * self.k)))]
        return [partial(self.library, self.x, weight) for weight in halves * -(-4 // len(halves))]

    def expected(self) -> torch.Tensor:
        return self.twin(self.x, self.weights[-1])

    def plans(self, sms: int) -> list[Any]:
        """The one that serves, then others worth a try: they fit into the shared memory and do not flood the GPU."""
        found = [plan_w4a16(self.m, self.n, len(self.weights[0].codes), sms)]
        rows = padded_rows(self.m)
        chunk = self.weights[0].codes.shape[2]
        for block_n, warps, stages in TILES:
            memory = stages * (2 * chunk * block_n + 8 * chunk * rows) + 2 * block_n * rows + 1024
            tiles = -(-self.n // block_n)
            for programs in [int(each * sms) for each in PROGRAMS] + [tiles * splits for splits in SPLITS]:
                each = -(-programs // sms)
                fits = each * memory <= SHARED_MEMORY and each * warps * 32 * 96 <= 65536
                if 0.7 * sms <= programs <= tiles * len(self.weights[0].codes) and fits:
                    found.append(W4Plan(block_n, programs, warps, stages))
        return list(dict.fromkeys(found))

    def kernel_key(self, plan: Any) -> tuple[object, ...]:
        """Equal where the compiled kernels are."""
        whole = plan and plan.programs == -(-self.n // plan.block_n)
        chunk = self.weights[0].codes.shape[2]
        return padded_rows(self.m), chunk, self.name == GATED, whole, plan and replace(plan, programs=0)

    def microseconds(self, plan: Any, stream: torch.cuda.Stream) -> float:
        return 1e6 * seconds([partial(self.kernel, self.x, weights, plan=plan) for weights in self.weights], stream)

    def error(self, plan: Any, expected: torch.Tensor) -> float:
        with poisoned():
            return error(self.kernel(self.x, self.weights[-1], plan=plan), expected)


class Fp8Case(Case):
    """The same in e4m3, by the product for few rows and by cuBLAS, which leaves the scales to others."""

    by = "fp8"

    def __init__(self, name: str, weights: list[tuple[torch.Tensor, torch.Tensor]], m: int) -> None:
        self.name, self.m, self.weights = name, m, weights * -(-8 // len(weights))
        self.n, self.k = weights[0][0].shape
        self.x = quantize_rows(normal(m, self.k))
        self.kernel = lambda x, weight, plan=None: skinny_fp8(x, *weight, None, torch.bfloat16, plan)
        self.twin = lambda x, weight: reference.skinny_fp8(x, *weight, None, torch.bfloat16)
        self.bytes = self.n * self.k + m * (self.k + 2 * self.n)

    def library_calls(self) -> list[Call]:
        return [partial(fp8_sums, self.x, weight, torch.bfloat16) for weight, _ in self.weights]

    def plans(self, sms: int) -> list[Any]:
        found = [plan_skinny_fp8(self.m, self.n, self.k, sms)]
        for (block_m, block_n, warps), stages, splits in product(FP8_TILES, FP8_STAGES, FP8_SPLITS):
            tiles = -(-self.m // block_m) * -(-self.n // block_n)
            each = -(-tiles * splits // sms)  # programs a multiprocessor
            fits = stages * FP8_COLUMNS * (block_m + block_n) <= SHARED_MEMORY // (1 if splits == 1 else each)
            if fits and block_m < 2 * self.m and (splits == 1 or each <= 3) and tiles * splits >= 0.5 * sms:
                found.append(SkinnyPlan(block_n, FP8_COLUMNS, splits, warps, stages, block_m))
        return list(dict.fromkeys(found))

    def kernel_key(self, plan: Any) -> tuple[object, ...]:
        return (replace(plan, splits=min(plan.splits, 2)),)


def cases(chunk: int) -> Iterator[list[Case]]:
    """The cases of each shape."""
    for name in (*SHAPES, GATED):
        n, k = SHAPES[name.rstrip("*")]
        weights = [random_w4(n, k, chunk) for _ in range(-(-ROTATED // (n * k // 2)))]
        yield [Case(name, weights, m) for m in ROWS]


def fp8_cases() -> Iterator[list[Case]]:
    for name, (n, k) in SHAPES.items():
        weights = [quantize_weight(normal(n, k) * 0.02) for _ in range(-(-ROTATED // (n * k)))]
        yield [Fp8Case(name, weights, m) for m in FP8_ROWS]


def measure(
    stream: torch.cuda.Stream, groups: list[list[Case]], sweep: bool, deadline: float
) -> Iterator[dict[str, Any]]:
    """One row a case and way, until the deadline."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    jobs = [(case, plan) for group in groups for case in group for plan in (case.plans(sms) if sweep else [None])]
    compiled = {case.kernel_key(plan): (case, plan) for case, plan in jobs}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of a compilation runs outside the interpreter lock
        list(pool.map(lambda job: job[0].kernel(job[0].x, job[0].weights[0], plan=job[1]), compiled.values()))
    torch.cuda.synchronize()
    print(f"{len(compiled)} kernels compiled", flush=True)
    for case in chain(*groups):
        key = {"shape": case.name, "m": case.m}
        yield {**key, "by": "cuBLAS", "us": 1e6 * seconds(case.library_calls(), stream)}
        expected = case.expected()
        for number, plan in enumerate(case.plans(sms) if sweep else [None]):
            if time.monotonic() > deadline:
                return
            taken = case.microseconds(plan, stream)
            row = {**key, "by": case.by, "us": taken, "gb_s": case.bytes / taken / 1e3}
            yield {**row, "error": case.error(plan, expected), "serves": number == 0, "plan": plan and asdict(plan)}


def layers_of(shape: LinearShape, scheme: Callable[[], LinearScheme]) -> list[Linear]:
    """As many as make up the bytes that take turns, with 4 bits a weight."""
    generator = torch.Generator("cuda").manual_seed(4)
    layers = []
    for _ in range(-(-2 * ROTATED // (shape.outputs * shape.inputs))):
        made, modules = scheme(), {"w": slice(0, shape.outputs)}
        layers.append(Linear(shape.inputs, modules, shape.bias, lambda names, made=made: made, shape.dtype, CUDA))
        layers[-1].randomize(generator)
    return layers


def measure_chosen(stream: torch.cuda.Stream) -> Iterator[dict[str, Any]]:
    """One row a shape and number of rows: cuBLAS alone and in its place, FP8 alone, and the way the layers chose."""
    choices = MeasuredChoices(Path(mkdtemp()) / "choices.json", graph_milliseconds)
    for name, (n, k) in SHAPES.items():
        shape = LinearShape(n, k, name == "qkv", PLACES[name], torch.bfloat16)
        schemes: dict[str, Callable[[], LinearScheme]] = {
            "in place": Unquantized,
            "fp8": Fp8OnLoad,
            "chosen": partial(Awq, GROUP),
        }
        kinds = {kind: layers_of(shape, scheme) for kind, scheme in schemes.items()}
        for kind in ("fp8", "chosen"):
            kinds[kind][0].scheme.tune(kinds[kind], shape, choices, "here")
        for m in CHOSEN_ROWS:
            x, place = normal(m, k), InPlace(shape, m, CUDA)
            timed: dict[str, list[Call]] = {"cuBLAS": [partial(layer, x) for layer in kinds["in place"]]}
            for kind, layers in kinds.items():
                calls = layers * -(-8 // len(layers))
                timed[kind] = [partial(place.run, layer) for layer in calls]
                timed[f"beside {kind}"] = [partial(place.without, layers[0].takes_fp8(m))] * len(calls)
            taken = {way: 1e6 * each for way, each in in_turns(timed, stream).items()}
            row = {kind: taken[kind] - taken[f"beside {kind}"] for kind in kinds}
            ways = {f"{kind} way": _way(kinds[kind][0], m) for kind in ("fp8", "chosen")}
            yield {"shape": name, "m": m, "cuBLAS": taken["cuBLAS"]} | row | ways


def _way(layer: Linear, m: int) -> str:
    assert isinstance(layer.scheme, MeasuredScheme)
    return layer.scheme.way(layer, m)


def print_chosen(found: list[dict[str, Any]]) -> None:
    print("\nshape        m   cuBLAS us   in place     fp8 us  chosen us   ratio  TFLOP/s  ways")
    for row in found:
        n, k = SHAPES[row["shape"]]
        rate = 2e-6 * row["m"] * n * k / row["chosen"]
        line = "{shape:8} {m:5} {cuBLAS:11.2f} {in place:10.2f} {fp8:10.2f} {chosen:10.2f}".format(**row)
        print(f"{line} {row['in place'] / row['chosen']:7.2f} {rate:8.0f}  {row['fp8 way']}, {row['chosen way']}")
    for m in CHOSEN_ROWS:
        by = ("cuBLAS", "in place", "fp8", "chosen")
        library, in_place, fp8, chosen = (sum(row[each] for row in found if row["m"] == m) for each in by)
        print(f"sum      {m:5} {library:11.2f} {in_place:10.2f} {fp8:10.2f} {chosen:10.2f} {in_place / chosen:7.2f}")
        notes = {"fp8_alone": round(library / fp8, 3), "over_bf16_in_place": round(in_place / chosen, 3)}
        emit(f"quant.chosen.m{m}", round(library / chosen, 3), "x", COMMAND, **notes)


def print_table(found: list[dict[str, Any]], record: bool) -> None:
    print(f"\nshape        m   cuBLAS us {found[-1]['by']:>8} us   ratio    GB/s     error  plan")
    sums: dict[int, list[float]] = {}
    for name, m in dict.fromkeys((row["shape"], row["m"]) for row in found):
        rows = [row for row in found if (row["shape"], row["m"]) == (name, m)]
        library, ours = rows[0], sorted(rows[1:], key=lambda row: row["us"])
        wrong = [row for row in ours if not row["error"] < TOLERANCE]
        if wrong:
            print(f"{len(wrong)} of {len(ours)} WRONG, for instance {wrong[0]}")
        for row in ours[:4] + [row for row in ours[4:] if row["serves"]]:
            plan = ", ".join(f"{name} {value}" for name, value in (row["plan"] or {}).items()) + " *" * row["serves"]
            line = f"{name:8} {m:5} {library['us']:11.2f} {row['us']:10.2f} {library['us'] / row['us']:7.2f}"
            print(f"{line} {row['gb_s']:7.0f}  {row['error']:.1e}  {plan}")
        if ours and name != GATED:
            total = sums.setdefault(m, [0.0, 0.0])
            total[0], total[1] = total[0] + library["us"], total[1] + ours[0]["us"]
    for m, (library_us, ours_us) in sums.items():
        print(f"sum      {m:5} {library_us:11.2f} {ours_us:10.2f} {library_us / ours_us:7.2f}")
        if record:
            emit(f"quant.w4a16.m{m}", round(library_us / ours_us, 3), "x", COMMAND, microseconds=round(ours_us, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="?", const="w4a16", choices=["w4a16", "fp8"], help="time many plans")
    parser.add_argument("--seconds", type=float, default=60, help="a sweep stops after this many, from the start")
    parser.add_argument("--chunk", type=int, default=64, help="columns of a chunk of the layout")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    if not torch.cuda.is_available():
        sys.exit("linear needs a GPU")
    torch.manual_seed(4)
    stream = torch.cuda.Stream()
    with torch.inference_mode():
        ceiling = copy_speed(stream) / 1e9
        print(f"{torch.cuda.get_device_name()}: copy {ceiling:.0f} GB/s", flush=True)
        groups = fp8_cases() if options.sweep == "fp8" else cases(options.chunk)
        groups = [group for group in groups if not (options.sweep and group[0].name == GATED)]
        found = list(measure(stream, groups, bool(options.sweep), deadline))
        print_table(found, record=not options.sweep)
        chosen = [] if options.sweep else list(measure_chosen(stream))
    if chosen:
        print_chosen(chosen)
    if time.monotonic() > deadline:
        print("stopped by --seconds: some plans were not measured")
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "linear.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found + chosen))


if __name__ == "__main__":
    main()
