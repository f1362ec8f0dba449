"""cuBLASLt's algorithms for a product, among which torch does not choose: the library that torch has loaded, by ctypes.

Numbers are those of cublasLt.h and library_types.h of CUDA 12 and 13. Matrices are column by column there: our y [m, n]
= x [m, k] W [n, k]^T + b, row by row, is D [n, m] = A^T B + bias with A = W and B = x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from bench_kernels import error, poisoned
from energy import Cost, Lap, Repeater

from tessera.checkpoint.config import CheckpointConfig
from tessera.kernels.fp8_rows import E4M3, fp8_sums, quantize_rows

if TYPE_CHECKING:
    from joules_account import Report, Sizes

DTYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28}
COMPUTE_32F, R_32F, TRANSPOSE, WITH_BIAS = 68, 0, 1, 4
TRANSA, EPILOGUE, BIAS_POINTER, A_SCALE, B_SCALE, FAST_ACCUMULATION = 3, 7, 8, 17, 18, 25
MOST_WORKSPACE = 1
CONFIG = {"tile": 1, "split": 2, "swizzle": 4, "custom": 5, "stages": 6, "cluster": 8}
WORKSPACE_BYTES = 32 << 20  # as torch gives it on Hopper
MOST = 32
TOLERANCE = 1e-2  # of 16-bit results, relative, in norm
COPIES = 2  # of weights and activations, taken in turn
QUICK_S = 0.04  # for a first look at each
FINALISTS = 3


class Algorithm(ctypes.Structure):
    """Opaque."""

    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """One of the library's proposals, the likeliest first."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


SIGNATURES: dict[str, list[Any]] = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int)],
    "cublasLtMatmulAlgoConfigGetAttribute": [c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)],
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


def loaded_library() -> ctypes.CDLL:
    """The one in this process. RuntimeError where torch has loaded none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublasLt.so" in line:
            return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("torch has loaded no libcublasLt: was there a product on the GPU?")


class Products:
    """x W^T + b for x [m, k] and W [n, k] of one shape and dtype; ``bias`` [n] or None, ``out`` [m, n]'s dtype."""

    def __init__(
        self, library: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.dtype
    ) -> None:
        self._library = library
        for name, types in SIGNATURES.items():
            getattr(library, name).argtypes = types
        (m, k), n = x.shape, len(weight)
        self._out, self._kept = out, [bias]
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        self._alpha, self._beta = c_float(1.0), c_float(0.0)
        self._handle = self._made("cublasLtCreate")
        self._description = self._made("cublasLtMatmulDescCreate", COMPUTE_32F, R_32F)
        self._describe(TRANSA, c_int(TRANSPOSE))
        if bias is not None:
            self._describe(EPILOGUE, c_uint32(WITH_BIAS))
            self._describe(BIAS_POINTER, c_void_p(bias.data_ptr()))
        if x.dtype == E4M3:
            one = torch.ones((), device=x.device)
            self._kept.append(one)
            self._describe(A_SCALE, c_void_p(one.data_ptr()))
            self._describe(B_SCALE, c_void_p(one.data_ptr()))
            self._describe(FAST_ACCUMULATION, c_int8(1))
        kind = DTYPES[x.dtype]
        self._a = self._made("cublasLtMatrixLayoutCreate", kind, k, n, k)
        self._b = self._made("cublasLtMatrixLayoutCreate", kind, k, m, k)
        self._d = self._made("cublasLtMatrixLayoutCreate", DTYPES[out], n, m, n)

    def algorithms(self) -> list[Algorithm]:
        """Those that the library proposes, the likeliest first."""
        preference = self._made("cublasLtMatmulPreferenceCreate")
        most = c_uint64(WORKSPACE_BYTES)
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, byref(most), 8)
        found, count = (Heuristic * MOST)(), c_int()
        layouts = (self._a, self._b, self._d, self._d)
        given = (self._handle, self._description, *layouts, preference, MOST, byref(found), byref(count))
        self._call("cublasLtMatmulAlgoGetHeuristic", *given)
        return [each.algorithm for each in found[: count.value] if each.state == 0]

    def in_words(self, algorithm: Algorithm) -> str:
        """Its numbers; what they stand for is the library's."""
        words = []
        for name, attribute in CONFIG.items():
            value, written = c_uint32(), c_size_t()
            size = 2 if name == "cluster" else 4
            given = (byref(algorithm), attribute, byref(value), size, byref(written))
            if not self._library.cublasLtMatmulAlgoConfigGetAttribute(*given):
                words.append(f"{name} {value.value}")
        return " ".join(words)

    def run(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """On the current stream. RuntimeError if the algorithm cannot."""
        out = torch.empty((len(x), len(weight)), dtype=self._out, device=x.device)
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else None
        operands = (weight.data_ptr(), self._a, x.data_ptr(), self._b, byref(self._beta))
        result = (out.data_ptr(), self._d) * 2
        work = (byref(algorithm), self._workspace.data_ptr(), WORKSPACE_BYTES, stream)
        self._call("cublasLtMatmul", self._handle, self._description, byref(self._alpha), *operands, *result, *work)
        return out

    def _describe(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._call("cublasLtMatmulDescSetAttribute", self._description, attribute, byref(value), size)

    def _made(self, function: str, *given: Any) -> c_void_p:
        made = c_void_p()
        self._call(function, byref(made), *given)
        return made

    def _call(self, function: str, *given: Any) -> None:
        if status := getattr(self._library, function)(*given):
            raise RuntimeError(f"{function} gave status {status}")


@dataclass(frozen=True)
class Shape:
    """Of the product of a layer."""

    name: str
    m: int
    n: int
    k: int
    bias: bool


def shapes(config: CheckpointConfig, sizes: Sizes) -> list[Shape]:
    """A step's and a forward's."""
    text, vision, m = config.text, config.vision, sizes.tokens
    queries, keys = (heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads))
    hidden, inner = text.hidden_size, text.intermediate_size
    rows, width, wide = sizes.tiles * (vision.patches_per_side**2 + 1), vision.hidden_size, vision.intermediate_size
    return [
        Shape("prefill.qkv", m, queries + 2 * keys, hidden, text.attention_bias),
        Shape("prefill.output", m, hidden, queries, False),
        Shape("prefill.gate_up", m, 2 * inner, hidden, False),
        Shape("prefill.down", m, hidden, inner, False),
        Shape("vision.qkv", rows, 3 * width, width, True),
        Shape("vision.output", rows, width, width, True),
        Shape("vision.fc1", rows, wide, width, True),
        Shape("vision.fc2", rows, width, wide, True),
    ]


def compare(
    of: Sequence[Shape], fp8: bool, dtype: torch.dtype, library: Any, repeater: Repeater, report: Report
) -> None:
    """torch's choice and the library's proposals; the fastest of those by joules too.

    In ``fp8`` all products are without bias and scales (:func:`tessera.kernels.fp8_rows.fp8_sums`), for which cuBLAS
    has the most kernels; the engine's in large steps are given a scale a row and a column.
    """
    device = repeater.device
    for shape in of:
        weights = [torch.randn(shape.n, shape.k, dtype=dtype, device=device) * 0.02 for _ in range(COPIES)]
        inputs = [torch.randn(shape.m, shape.k, dtype=dtype, device=device) for _ in range(COPIES)]
        bias = torch.randn(shape.n, dtype=dtype, device=device) if shape.bias and not fp8 else None
        ways: dict[str, list[Lap]] = {"torch": [partial(F.linear, x, w, bias) for x, w in zip(inputs, weights)]}
        if fp8:
            rows = [quantize_rows(x) for x in inputs]
            inputs, weights = [each.values for each in rows], [quantize_rows(weight).values for weight in weights]
            ways = {"torch": [partial(fp8_sums, x, w, dtype) for x, w in zip(rows, weights)]}
        expected = ways["torch"][0]()
        products = Products(library or loaded_library(), inputs[0], weights[0], bias, dtype)
        report.title(f"{shape.name}: {shape.m} x {shape.n} x {shape.k}")
        quick = replace(repeater, seconds=QUICK_S, settle_s=QUICK_S / 2)
        found: dict[str, float] = {}
        for number, algorithm in enumerate(products.algorithms()):
            name = f"{number}: {products.in_words(algorithm)}"
            laps: list[Lap] = [partial(products.run, algorithm, x, weight) for x, weight in zip(inputs, weights)]
            try:
                with poisoned():
                    wrong = error(products.run(algorithm, inputs[0], weights[0]), expected)
                if not wrong < TOLERANCE:
                    print(f"{name}: WRONG, error {wrong:.1e}", flush=True)
                    continue
                found[name], ways[name] = quick.recorded(laps).seconds, laps
            except RuntimeError as refusal:
                print(f"{name}: refused, {refusal}", flush=True)
        best = ["torch", *sorted(found, key=found.__getitem__)[:FINALISTS]]
        costs = {name: repeater.recorded(ways[name]) for name in best}
        for name, cost in costs.items():
            report.row(name, cost)
        print(f"of {len(found)} algorithms", flush=True)
        _emit(shape, costs, report)


def _emit(shape: Shape, costs: Mapping[str, Cost], report: Report) -> None:
    """The ratio of torch's choice to the one that takes the fewest joules."""
    name = min(costs, key=lambda each: costs[each].joules)
    ratios = {"time": round(costs["torch"].seconds / costs[name].seconds, 4), "algorithm": name}
    report.figure(f"algorithms.{shape.name}", costs["torch"].joules / costs[name].joules, "x", **ratios)
