"""A layer of a small model's decode step on one GPU, by kernels that wait first of all and by those that fetch before
they wait (`make bench NAME=decode_layer`, half a minute).

PaddleOCR-VL's body, ten sequences of 1,528 tokens, 18 layers in one CUDA graph, so that nothing comes from the L2
cache. docs/joules.md has what was learned. Microseconds a layer:

    decode_layer.paddle.late_us     kernels that wait for the one in front before they read anything
    decode_layer.paddle.early_us    those that a server takes for up to 16 sequences; `alone`: chains of one kind;
                                    `error`: of a layer, against the others
    decode_layer.paddle.meetings_us five barriers of the grid, as one kernel for all layers would need a layer
    decode_layer.paddle.bound_us    what such a kernel could not do without, see :func:`_bound`
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from figures import emit

from bench.kernel_case import error, in_turns
from tessera.kernels.early_linear import early_gate_up, early_linear
from tessera.kernels.operands import DeferredProduct, EarlyProduct, NormedRows, PagedCache, finished
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.rotary import rotate_and_store
from tessera.kernels.skinny_linear import multiprocessors
from tessera.kernels.tuning import layer_kernels

BLOCK, EPS = 16, 1e-5
PARTS = ("qkv", "attention", "output", "gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """A body without biases, and what decodes."""

    layers: int = 18
    hidden: int = 1024
    inner: int = 3072
    heads: int = 16
    kv_heads: int = 2
    size: int = 128
    sequences: int = 10
    context: int = 1528


class Layers:
    """Random weights, keys and values, and what a step keeps between its kernels."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        def normal(*sizes: int, std: float = 1.0) -> torch.Tensor:
            return torch.randn(sizes, device=device).mul_(std).to(dtype)

        self.shape, self.device = shape, device
        width, queries = (shape.heads + 2 * shape.kv_heads) * shape.size, shape.heads * shape.size
        sizes = {"qkv": (width, shape.hidden), "output": (shape.hidden, queries)}
        sizes |= {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        every = range(shape.layers)
        self.weights = {name: [normal(*each, std=0.02) for _ in every] for name, each in sizes.items()}
        self.norms = [1 + normal(2, shape.hidden, std=0.1) for _ in every]
        blocks, n = -(-shape.context // BLOCK), shape.sequences
        self.caches = [PagedCache(*normal(2, n * blocks, BLOCK, shape.kv_heads, shape.size)) for _ in every]
        self.table = torch.randperm(n * blocks, device=device).view(blocks, n)
        self.lengths = torch.full((n,), shape.context, dtype=torch.int64, device=device)
        angles = torch.rand((n, shape.size // 2), device=device) * 6
        self.turns = angles.cos(), angles.sin(), self.table[-1] * BLOCK + (shape.context - 1) % BLOCK
        self.stream, self.x = normal(n, shape.hidden), normal(n, shape.hidden)
        self.qkv, self.attended, self.active = (normal(n, each) for each in (width, queries, shape.inner))
        self.deferred: torch.Tensor | DeferredProduct = self.x

    def late(self, layer: int) -> None:
        """The last product of the layer before is added by the first norm."""
        kernels = layer_kernels(self.device.type)
        normal, _ = kernels.add_rms_norm(self.deferred if layer else self.x, self.stream, self.norms[layer][0], EPS)
        self._rotate(kernels.skinny_deferred(normal, self.weights["qkv"][layer]), layer)
        self._attend(layer, settled=False)
        output = kernels.skinny_deferred(self.attended, self.weights["output"][layer])
        normal, _ = kernels.add_rms_norm(output, self.stream, self.norms[layer][1], EPS)
        active = kernels.skinny_gate_up(normal, self.weights["gate_up"][layer])
        self.deferred = kernels.skinny_deferred(active, self.weights["down"][layer])

    def early(self, layer: int, only: str | None = None) -> None:
        """The stream, with everything added, before the layer -> behind it; or what one kernel does alone."""
        first, second = (NormedRows(self.stream, norm, EPS) for norm in self.norms[layer])
        weights = {name: each[layer] for name, each in self.weights.items()}
        if only in (None, "qkv"):
            self._rotate(EarlyProduct(first, weights["qkv"], None), layer)
        if only in (None, "attention"):
            self._attend(layer, settled=True)
        if only in (None, "output"):
            early_linear(self.attended, weights["output"], None, self.stream)
        if only in (None, "gate_up"):
            self.active = early_gate_up(second, weights["gate_up"])
        if only in (None, "down"):
            early_linear(self.active, weights["down"], None, self.stream)

    def _rotate(self, qkv: torch.Tensor | DeferredProduct, layer: int) -> None:
        self.qkv = rotate_and_store(qkv, *self.turns, self.caches[layer], self.shape.heads)

    def _attend(self, layer: int, settled: bool) -> None:
        shape = self.shape
        queries = self.qkv.view(shape.sequences, -1, shape.size)[:, : shape.heads]
        splits = choose_splits(shape.sequences, shape.kv_heads, 4096, multiprocessors(self.device))
        given = queries, self.caches[layer], self.table, self.lengths, shape.size**-0.5, splits
        decode_attention(*given, self.attended.view(queries.shape), settled=settled)


class Bound:
    """What :func:`_bound` reads and writes, of PaddleOCR-VL's sizes, for ``programs``, one a multiprocessor."""

    def __init__(self, programs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.randn((256, 128), device=device).mul_(0.02).to(dtype)
        self.rows = [torch.randn((16, size), device=device).to(dtype) for size in (1024, 2560, 2048, 3072)]
        self.met = torch.zeros(1, dtype=torch.int32, device=device)
        self._programs = programs

    def layers(self, count: int, phases: bool = True, **options: object) -> None:
        self.met.zero_()
        sizes = {"PROGRAMS": self._programs, "PHASES": phases, "num_warps": 8}
        _bound[(self._programs,)](self.weight, *self.rows, self.met, count, 10, **sizes, **options)


@triton.jit(do_not_specialize=["layers", "m"])
def _bound(weight, stream, qkv, attended, active, met, layers, m, PROGRAMS: tl.constexpr, PHASES: tl.constexpr):
    """Layers of one persistent kernel, weights in place, less than any such kernel does.

    Programs are clusters of eight. Each reads the eighth of its rows that it needs, multiplies it by its weights, of
    which one tile stands for all, and writes its share of the results. The sums over a cluster, softmax, attention's
    values, the norms, and the traffic of the next layer's weights are left out.
    """
    program = tl.program_id(0)
    part = program % 8
    depth, wide, thin = tl.arange(0, 128)[:, None], tl.arange(0, 256)[None, :], tl.arange(0, 64)[None, :]
    many = tl.load(weight + wide * 128 + depth)
    few = tl.load(weight + thin * 128 + depth)
    row = tl.arange(0, 16)[:, None]
    of_many, of_few = (row < m) & (wide // 32 == part), (row < m) & (thin // 8 == part)
    at_many, at_few = program * 32 + wide % 32, program * 8 + thin % 8
    target = 0
    for _ in range(layers):
        if PHASES and program < 80:  # q, k, v
            sums = tl.dot(_eighth(stream, part * 128, m, 1024), many)
            tl.store(qkv + row * 2560 + at_many, sums.to(qkv.dtype.element_ty), mask=of_many)
        target = _meet(met, target + PROGRAMS)
        if PHASES and program < 120:  # the scores of 256 keys
            scores = tl.dot(_eighth(qkv, program % 2 * 1024, m, 128), many)
            tl.store(attended + row * 2048 + at_many % 2048, scores.to(qkv.dtype.element_ty), mask=of_many)
        target = _meet(met, target + PROGRAMS)
        if PHASES and program < 128:  # output
            sums = tl.zeros((16, 64), tl.float32)
            for block in tl.static_range(2):
                sums = tl.dot(_eighth(attended, part * 256 + block * 128, m, 2048), few, sums)
            tl.store(stream + row * 1024 + at_few, sums.to(qkv.dtype.element_ty), mask=of_few)
        target = _meet(met, target + PROGRAMS)
        if PHASES and program < 96:  # gate, up
            x = _eighth(stream, part * 128, m, 1024)
            sums = tl.dot(x, many) * tl.dot(-x, many)
            tl.store(active + row * 3072 + at_many, sums.to(qkv.dtype.element_ty), mask=of_many)
        target = _meet(met, target + PROGRAMS)
        if PHASES and program < 128:  # down
            sums = tl.zeros((16, 64), tl.float32)
            for block in tl.static_range(3):
                sums = tl.dot(_eighth(active, part * 384 + block * 128, m, 3072), few, sums)
            tl.store(stream + row * 1024 + at_few, sums.to(qkv.dtype.element_ty), mask=of_few)
        target = _meet(met, target + PROGRAMS)


@triton.jit
def _eighth(x, first, m, stride):
    """From L2: another multiprocessor wrote it."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 128)[None, :]
    return tl.load(x + row * stride + first + column, mask=row < m, other=0.0, cache_modifier=".cg")


@triton.jit
def _meet(met, target):
    tl.debug_barrier()
    if tl.atomic_add(met, 1, sem="acq_rel") < target - 1:
        while tl.atomic_add(met, 0, sem="acquire") < target:
            pass
    return target


def error_of_a_layer(layers: Layers) -> float:
    """The stream behind the first layer by the early kernels against the late ones', relative, in norm."""
    begin = layers.stream.clone()
    layers.late(0)
    expected = layers.stream + finished(layers.deferred)
    layers.stream.copy_(begin + layers.x)
    layers.early(0)
    return error(layers.stream, expected)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode_layer: needs a GPU, and this machine has none")
    torch.manual_seed(0)
    layers, stream = Layers(Shape(), torch.bfloat16, torch.device("cuda")), torch.cuda.Stream()
    wrong, every = error_of_a_layer(layers), range(layers.shape.layers)
    kinds: dict[str, Callable[[int], None]] = {"late": layers.late, "early": layers.early}
    kinds |= {part: partial(layers.early, only=part) for part in PARTS}
    ways = {name: [partial(kind, layer) for layer in every] for name, kind in kinds.items()}
    us = {way: round(1e6 * seconds, 2) for way, seconds in in_turns(ways, stream).items()}
    bound = Bound(multiprocessors(layers.device), torch.bfloat16, layers.device)
    meet, both = ([partial(bound.layers, 500, phases, launch_cooperative_grid=True)] for phases in (False, True))
    least = {way: round(1e6 * s / 500, 2) for way, s in in_turns({"meetings": meet, "bound": both}, stream).items()}
    emit("decode_layer.paddle.late_us", us["late"], "us/layer")
    emit("decode_layer.paddle.early_us", us["early"], "us/layer", alone={part: us[part] for part in PARTS}, error=wrong)
    emit("decode_layer.paddle.meetings_us", least["meetings"], "us/layer")
    emit("decode_layer.paddle.bound_us", least["bound"], "us/layer")
    return 0
