"""FP8 on one GPU at the shapes of InternVL3-8B: the products, and the kernels that quantize in front of them.

For each shape and number of rows: cuBLAS in bfloat16, and the three products in e4m3 that the engine chooses from, each
in a CUDA graph over more weights than any cache holds, with its error. Then, for all numbers of rows, the sums over the
four shapes with what quantizing the activations adds to the kernels that are there anyway (`quantizing`): two norms,
the gated activation, and the rows behind the attention. About 20 seconds; $OUT, a folder, gets every measurement.

    PYTHONPATH=python_backends python loadtest/bench_fp8.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_kernels import LAUNCHES, copy_speed, error, normal, seconds

from tessera.engine.kernels.add_rms_norm import add_rms_norm
from tessera.engine.kernels.silu_multiply import silu_and_multiply
from tessera.engine.quantization.fp8 import PRODUCTS, SKINNY_ROWS
from tessera.fp8.rows import E4M3, quantize_rows

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # n, k
HIDDEN, FEED_FORWARD = 3584, 18944
ROWS = (1, 8, 10, 16, 32, 64, 96, 128, 256, 512, 2048, 8192)
ROTATED = 256 << 20  # bytes of weights that take turns

Times = dict[str, float]


def products(name: str, m: int, stream: torch.cuda.Stream) -> tuple[Times, dict[str, float]]:
    """Microseconds and errors of each way to multiply m rows; only qkv has a bias."""
    n, k = SHAPES[name]
    x = normal(m, k)
    bias = normal(n) if name == "qkv" else None
    copies = -(-ROTATED // (n * k))
    halves = [normal(n, k) for _ in range(-(-copies // 2))]
    times = {"cuBLAS bf16": microseconds([partial(F.linear, x, weight, bias) for weight in halves], stream)}
    weights = [weight.to(E4M3) for weight in halves for _ in range(2)]
    rows, scales = quantize_rows(x), torch.rand(n, device=x.device) * 0.01 + 0.001
    expected = rows.dequantized() @ (weights[-1].float() * scales[:, None]).t()
    expected += 0 if bias is None else bias.float()
    errors = {}
    for way, product in PRODUCTS.items():
        if way == "skinny" and m > SKINNY_ROWS:
            continue
        calls = [partial(product, rows, weight, scales, bias, x.dtype) for weight in weights]
        errors[way] = error(calls[-1](), expected)
        times[way] = microseconds(calls, stream)
    return times, errors


def quantizing(m: int, stream: torch.cuda.Stream) -> Times:
    """Microseconds of the kernels in front of the products, plain and quantizing."""
    copies, repeats = (4, 1) if m > 1024 else (1, LAUNCHES)
    weight = normal(HIDDEN)
    xs = [(normal(m, HIDDEN), normal(m, HIDDEN), normal(m, 2 * FEED_FORWARD)) for _ in range(copies)]

    def of(call: Callable[..., object]) -> float:
        return microseconds([partial(call, *each) for each in xs] * repeats, stream)

    return {
        "norm": of(lambda x, residual, _: add_rms_norm(x, residual, weight, 1e-6)),
        "norm fp8": of(lambda x, residual, _: add_rms_norm(x, residual, weight, 1e-6, fp8=True)),
        "silu": of(lambda x, residual, gate_up: silu_and_multiply(gate_up)),
        "silu fp8": of(lambda x, residual, gate_up: silu_and_multiply(gate_up, fp8=True)),
        "rows": of(lambda x, *_: quantize_rows(x)),
    }


def microseconds(calls: list[Callable[[], object]], stream: torch.cuda.Stream) -> float:
    return 1e6 * seconds(calls, stream)


def added(times: Times) -> float:
    """What quantizing adds to a decoder layer."""
    return 2 * (times["norm fp8"] - times["norm"]) + times["silu fp8"] - times["silu"] + times["rows"]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench_fp8.py needs a GPU")
    torch.manual_seed(4)
    stream = torch.cuda.Stream()
    found = []
    with torch.inference_mode():
        print(f"{torch.cuda.get_device_name()}: copy {copy_speed(stream) / 1e9:.0f} GB/s", flush=True)
        print("microseconds; the sums take the fastest product of each shape")
        for m in ROWS:
            library, fp8 = 0.0, 0.0
            for name, (n, k) in SHAPES.items():
                times, errors = products(name, m, stream)
                found.append({"m": m, "shape": name, "us": times, "errors": errors})
                best = min(errors, key=times.__getitem__)
                library, fp8 = library + times["cuBLAS bf16"], fp8 + times[best]
                listed = "  ".join(f"{way} {taken:8.1f}" for way, taken in times.items())
                rates = f"{n * k / times[best] / 1e3:5.0f} GB/s {2 * m * n * k / times[best] / 1e6:5.0f} TFLOP/s"
                print(f"{m:5} {name:8} {listed}  best {rates}  error {max(errors.values()):.1e}", flush=True)
            kernels = quantizing(m, stream)
            found.append({"m": m, "us": kernels})
            whole = fp8 + added(kernels)
            listed = "  ".join(f"{kernel} {taken:.1f}" for kernel, taken in kernels.items())
            print(f"{m:5} sum      {library:.1f} -> {fp8:.1f} + quantizing {added(kernels):.1f}", end="")
            print(f" = {whole:.1f}, ratio {library / whole:.2f}  ({listed})", flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "fp8.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
