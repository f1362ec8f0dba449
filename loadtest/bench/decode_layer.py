"""A layer of a small model's decode step on one GPU: today's eight kernels beside six that fetch before they wait
(`make bench NAME=decode_layer`, half a minute).

A prototype, not what a server runs: PaddleOCR-VL's body, ten sequences of 1,528 tokens, 18 layers in one CUDA graph, so
that nothing comes from the L2 cache. A program of a product takes all of k for a few rows of the weights. Nobody writes
those, so it asks for them before it waits for the kernel in front; so does attention for the keys and values that are
there already. The product behind a norm computes it, the one before an addition adds, attention rotates.
docs/joules.md has what was learned, and what of decoder.py the six would take the place of. Microseconds a layer:

    decode_layer.paddle.today_us    the kernels of tessera.kernels, as decoder.py calls them
    decode_layer.paddle.fused_us    the six; `alone`: chains of one kind; `error`: of a layer, against today's
    decode_layer.paddle.floor_us    the six where all programs read the same weights and keys, so without memory
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from figures import emit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bench.kernel_case import error, in_turns
from tessera.kernels.activation import gated
from tessera.kernels.fp8 import early_launch
from tessera.kernels.operands import DeferredProduct, PagedCache, finished
from tessera.kernels.paged_decode import choose_splits, decode_attention
from tessera.kernels.skinny_linear import multiprocessors
from tessera.kernels.tuning import layer_kernels

BLOCK, EPS = 16, 1e-5
PARTS = ("qkv", "attention", "merge", "output", "gate_up", "down")


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
    tokens: int = 128  # of a program of attention, 16 a warp


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
        self.slots = self.table[-1] * BLOCK + (shape.context - 1) % BLOCK
        angles = torch.rand((n, shape.size // 2), device=device) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.stream, self.x = normal(n, shape.hidden), normal(n, shape.hidden)
        self.qkv, self.attended, self.active = (normal(n, each) for each in (width, queries, shape.inner))
        self.splits = -(-shape.context // shape.tokens)
        self.partial = torch.empty((n, shape.heads, self.splits, shape.size), device=device)
        self.logs = torch.empty((n, shape.heads, self.splits), device=device)
        self.deferred: torch.Tensor | DeferredProduct = self.x

    def today(self, layer: int) -> None:
        """As DecoderLayer.forward: the last product of the layer before is added by the first norm."""
        kernels, shape = layer_kernels(self.device.type), self.shape
        normal, _ = kernels.add_rms_norm(self.deferred if layer else self.x, self.stream, self.norms[layer][0], EPS)
        qkv = kernels.skinny_deferred(normal, self.weights["qkv"][layer])
        cache = self.caches[layer]
        qkv = kernels.rotate_and_store(qkv, self.cos, self.sin, self.slots, cache, shape.heads)
        queries = qkv.view(shape.sequences, -1, shape.size)[:, : shape.heads]
        splits = choose_splits(shape.sequences, shape.kv_heads, 4096, multiprocessors(self.device))
        out = self.attended.view(queries.shape)
        decode_attention(queries, cache, self.table, self.lengths, shape.size**-0.5, splits, out)
        output = kernels.skinny_deferred(self.attended, self.weights["output"][layer])
        normal, _ = kernels.add_rms_norm(output, self.stream, self.norms[layer][1], EPS)
        active = kernels.skinny_gate_up(normal, self.weights["gate_up"][layer])
        self.deferred = kernels.skinny_deferred(active, self.weights["down"][layer])

    def fused(self, layer: int, same: bool = False, only: str | None = None) -> None:
        """The stream, with everything added, before the layer -> behind it; or one kernel alone."""
        first, second = self.norms[layer]
        steps: dict[str, Callable[..., object]] = {
            "qkv": partial(self._product, "qkv", 32, self.stream, self.qkv, norm=first),
            "attention": self._attend,
            "merge": self._merge,
            "output": partial(self._product, "output", 16, self.attended, self.stream, residual=self.stream),
            "gate_up": partial(self._product, "gate_up", 32, self.stream, self.active, norm=second),
            "down": partial(self._product, "down", 16, self.active, self.stream, residual=self.stream),
        }
        for name, step in steps.items():
            if only in (None, name):
                step(layer, same)

    def _product(
        self, name: str, columns: int, x: torch.Tensor, out: torch.Tensor, layer: int, same: bool,
        norm: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        weight = self.weights[name][layer]
        n, k = weight.shape
        block = min(k & -k, 1024)
        tile = {"K": k, "BLOCK_K": block, "COLUMNS": columns, "SLICES": 4, "GATED": name == "gate_up", "SAME": same}
        options = {**tile, "num_warps": 4, **early_launch(self.device)}
        _product[(n // columns,)](x, norm, residual, weight, out, self.shape.sequences, n, EPS, **options)

    def _attend(self, layer: int, same: bool) -> None:
        shape, (keys, values, *_) = self.shape, self.caches[layer]
        heads = {"KV_HEADS": shape.kv_heads, "GROUP": shape.heads // shape.kv_heads, "HALF": shape.size // 2}
        tile = {"BLOCK_SIZE": BLOCK, "TOKENS": shape.tokens, "SPLITS": self.splits, "WARPS": shape.tokens // 16}
        _attend[(shape.kv_heads, shape.sequences, self.splits)](
            self.qkv, self.cos, self.sin, self.slots, keys, values, self.table, self.lengths, self.partial, self.logs,
            shape.size**-0.5 * math.log2(math.e), *keys.stride()[:2], *self.table.stride(), **heads, **tile,
            SAME=same, num_warps=shape.tokens // 16, **early_launch(self.device),
        )  # fmt: skip

    def _merge(self, layer: int, same: bool) -> None:
        shape = self.shape
        sizes = {"HEADS": shape.heads, "SIZE": shape.size, "SPLITS": self.splits}
        options = {**sizes, "num_warps": 1, **early_launch(self.device)}
        _merge[(shape.heads, shape.sequences)](self.partial, self.logs, self.attended, **options)


@triton.jit
def _arranged(values, SLICES: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """[8, SLICES, PART / 32, ROWS / 8, 32] of rows of SLICES * PART values -> [SLICES, ROWS, PART].

    The values of each 32 change places, for both operands of a product alike, so that what a thread fetches as 16 bytes
    is what the tensor core wants of it: nothing passes through the shared memory.
    """
    values = values.reshape(8, SLICES, PART // 32, ROWS // 8, 4, 2, 2, 2)
    return values.permute(1, 3, 0, 2, 5, 6, 4, 7).reshape(SLICES, ROWS, PART)


@triton.jit(do_not_specialize=["m"])
def _product(
    x, norm, residual, weight, out, m, n, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, GATED: tl.constexpr,
    SAME: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [m <= 16, K], normalised if there is a norm, W^T, plus the residual or ended by the gated activation.

    One program COLUMNS of the result, each warp a slice of k. The root mean square is divided by at the end.
    """
    if EARLY:
        gdc_launch_dependents()
    PART: tl.constexpr = BLOCK_K // SLICES
    start = tl.program_id(0) * COLUMNS
    eight = tl.arange(0, 8)[:, None, None, None, None]
    slice_at = (tl.arange(0, SLICES) * PART)[None, :, None, None, None]
    at = slice_at + (tl.arange(0, PART // 32) * 32)[None, None, :, None, None]
    at += tl.arange(0, 32)[None, None, None, None, :]
    tile = (tl.arange(0, COLUMNS // 8) * 8)[None, None, None, :, None] + eight
    if SAME:
        w_row = tile
    elif GATED:  # in turn: gate, up, gate, up, ...
        w_row = start // 2 + tile // 2 + tile % 2 * (n // 2)
    else:
        w_row = start + tile
    w_at = weight + w_row * K + at
    x_row = (tl.arange(0, 2) * 8)[None, None, None, :, None] + eight
    x_at = x + x_row * K + at
    weights = ()
    scales = ()
    for step in tl.static_range(K // BLOCK_K):
        weights += (_arranged(tl.load(w_at + step * BLOCK_K), SLICES, PART, COLUMNS),)
        if norm is not None:
            scales += (_arranged(tl.load(norm + step * BLOCK_K + at + 0 * x_row), SLICES, PART, 16),)
    row = tl.arange(0, 16)
    used = (row < m)[:, None]
    if EARLY:
        gdc_wait()
    place = row[:, None] * n + (start + tl.arange(0, COLUMNS))[None, :]
    if residual is not None:
        old = tl.load(residual + place, mask=used, other=0.0).to(tl.float32)
    total = tl.zeros((SLICES, 16, COLUMNS), tl.float32)
    squares = tl.zeros((SLICES, 16), tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        value = _arranged(tl.load(x_at + step * BLOCK_K, mask=x_row < m, other=0.0), SLICES, PART, 16)
        if norm is not None:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            value = value * scales[step]
        total = tl.dot(value, weights[step].trans(0, 2, 1), total)
    sums = tl.sum(total, 0)
    if norm is not None:
        sums *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
    sums = sums.to(out.dtype.element_ty)
    if GATED:
        gate, up = sums.reshape(16, COLUMNS // 2, 2).split()
        column = start // 2 + tl.arange(0, COLUMNS // 2)
        tl.store(out + row[:, None] * (n // 2) + column[None, :], gated(gate, up), mask=used)
    else:
        if residual is not None:
            sums = (sums.to(tl.float32) + old).to(out.dtype.element_ty)
        tl.store(out + place, sums, mask=used)


@triton.jit
def _rotated(at, cosine, sine, HALF: tl.constexpr, mask):
    """Heads at pointers [.., 1], float32 [.., 2 * HALF]; ``sine`` is negative in the first half."""
    column = tl.arange(0, 2 * HALF)[None, :]
    value = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(at + (column + HALF) % (2 * HALF), mask=mask, other=0.0).to(tl.float32)
    return value * cosine + other * sine


@triton.jit(do_not_specialize=["blocks", "lengths", "blocks_step", "blocks_column"])
def _attend(
    qkv, cos, sin, slots, keys, values, blocks, lengths, partial, logs, scale,
    cache_block, cache_slot, blocks_step, blocks_column,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, WARPS: tl.constexpr, SAME: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TOKENS of one sequence's context for the query heads of one key head, which it rotates. The program that has the
    newest token adds it from ``qkv``, and stores its key and value."""
    if EARLY:
        gdc_launch_dependents()
    SIZE: tl.constexpr = 2 * HALF
    HEADS: tl.constexpr = KV_HEADS * GROUP
    REPEATS: tl.constexpr = TOKENS // (8 * WARPS)
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    start = split * TOKENS
    end = tl.minimum(start + TOKENS, length - 1)
    owner = (start < length) & (length <= start + TOKENS)
    column = tl.arange(0, SIZE)
    table = blocks + sequence * blocks_column
    row = tl.arange(0, 16)
    head = kv_head * GROUP + row
    part = (sequence * HEADS + head) * SPLITS + split

    token = tl.arange(0, 8)[:, None, None, None, None] + (tl.arange(0, WARPS) * 8)[None, :, None, None, None]
    token += (tl.arange(0, REPEATS) * 8 * WARPS)[None, None, None, :, None] + start
    at = (tl.arange(0, SIZE // 32) * 32)[None, None, :, None, None] + tl.arange(0, 32)[None, None, None, None, :]
    block = tl.load(table + (token // BLOCK_SIZE) * blocks_step, mask=token < end, other=0)
    if SAME:
        block = block * 0
    place = block * cache_block + token % BLOCK_SIZE * cache_slot + kv_head * SIZE
    key = tl.load(keys + place + at, mask=token < end, other=0.0)
    key = key.reshape(8, WARPS, SIZE // 32, REPEATS, 4, 2, 2, 2).permute(3, 1, 0, 2, 5, 6, 4, 7).reshape(TOKENS, SIZE)
    position = start + tl.arange(0, TOKENS)
    block = tl.load(table + (position // BLOCK_SIZE) * blocks_step, mask=position < end, other=0)
    if SAME:
        block = block * 0
    place = (block * cache_block + position % BLOCK_SIZE * cache_slot + kv_head * SIZE)[:, None] + column[None, :]
    value = tl.load(values + place, mask=(position < end)[:, None], other=0.0)
    used = (row < GROUP)[:, None]
    slot = tl.load(slots + sequence)
    cosine = tl.load(cos + sequence * HALF + column % HALF)[None, :]
    sine = (tl.load(sin + sequence * HALF + column % HALF) * tl.where(column < HALF, -1.0, 1.0))[None, :]
    line = qkv + sequence * ((HEADS + 2 * KV_HEADS) * SIZE)
    one = tl.arange(0, 1)[:, None]

    if EARLY:
        gdc_wait()
    query = _rotated(line + head[:, None] * SIZE, cosine, sine, HALF, used).to(qkv.dtype.element_ty)
    new_key = _rotated(line + (HEADS + kv_head) * SIZE + one, cosine, sine, HALF, one < 1).to(keys.dtype.element_ty)
    new_value = tl.load(line + (HEADS + KV_HEADS + kv_head) * SIZE + one + column[None, :])
    if owner:
        stored = slot * (KV_HEADS * SIZE) + kv_head * SIZE + one + column[None, :]
        tl.store(keys + stored, new_key)
        tl.store(values + stored, new_value)
    newest = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    query = query.reshape(16, SIZE // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(16, SIZE)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(position[None, :] < end, scores, -float("inf"))
    newest = tl.where(owner, newest, -float("inf"))
    top = tl.maximum(tl.max(scores, 1), newest)
    weight = tl.exp2(scores - top[:, None])
    last = tl.exp2(newest - top)
    total = tl.sum(weight, 1) + last
    mixed = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    mixed = (mixed + last[:, None] * new_value.to(tl.float32)) / total[:, None]
    tl.store(partial + part[:, None] * SIZE + column[None, :], mixed, mask=used)
    tl.store(logs + part, top + tl.log2(total), mask=row < GROUP)


@triton.jit
def _merge(
    partial, logs, out, HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The mean of one head's splits, weighted by the sums of their exponentials."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) + tl.program_id(1).to(tl.int64) * HEADS
    split = tl.arange(0, triton.next_power_of_2(SPLITS))
    column = tl.arange(0, SIZE)
    part = head * SPLITS + split
    log = tl.load(logs + part, mask=split < SPLITS, other=-float("inf"))
    mixed = tl.load(partial + part[:, None] * SIZE + column[None, :], mask=(split < SPLITS)[:, None], other=0.0)
    weight = tl.exp2(log - tl.max(log, 0))
    merged = tl.sum(mixed * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * SIZE + column, merged.to(out.dtype.element_ty))


def error_of_a_layer(layers: Layers) -> float:
    """The six kernels' stream behind the first layer against today's, relative, in norm."""
    begin = layers.stream.clone()
    layers.today(0)
    expected = layers.stream + finished(layers.deferred)
    layers.stream.copy_(begin + layers.x)
    layers.fused(0)
    return error(layers.stream, expected)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode_layer: needs a GPU, and this machine has none")
    torch.manual_seed(0)
    layers, stream = Layers(Shape(), torch.bfloat16, torch.device("cuda")), torch.cuda.Stream()
    wrong, every = error_of_a_layer(layers), range(layers.shape.layers)
    ways = {
        "today": [partial(layers.today, layer) for layer in every],
        "fused": [partial(layers.fused, layer) for layer in every],
        "floor": [partial(layers.fused, layer, same=True) for layer in every],
        **{part: [partial(layers.fused, layer, only=part) for layer in every] for part in PARTS},
    }
    us = {way: round(1e6 * seconds, 2) for way, seconds in in_turns(ways, stream).items()}
    emit("decode_layer.paddle.today_us", us["today"], "us/layer")
    emit("decode_layer.paddle.fused_us", us["fused"], "us/layer", alone={part: us[part] for part in PARTS}, error=wrong)
    emit("decode_layer.paddle.floor_us", us["floor"], "us/layer")
    return 0
