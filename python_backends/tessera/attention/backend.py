"""The contract of attention over paged keys and values.

Once a step the runner asks for a plan (indices, masks: whatever can be shared by all layers); each layer then calls
:meth:`AttentionBackend.attend` with its fused q, k, v. Normalising heads, rotating, storing and attending are one
call, so that a backend may fuse them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.errors import ConfigError
from tessera.kernels.fp8_rows import E4M3, quantize_rows
from tessera.kernels.operands import DeferredProduct, HeadNorms, PagedCache, finished
from tessera.kernels.reference import norm_heads


class KvStorage:
    """Keys and values of every layer: ``layers``. Their shape is [num_blocks, block_size, kv_heads, head_dim].

    Slot ``block * block_size + offset`` holds one position. What lies behind a sequence's context is somebody else's
    and may be NaN: attention does not read it, not even to mask it, as 0 times NaN is NaN.

    In ``fp8`` they are e4m3, to be multiplied by scales, one float32 a position and head,
    [num_blocks, block_size, kv_heads]: so keys beyond e4m3's 448, as the biased ones of Qwen2 may be, do not saturate,
    small values keep their bits, and nothing is calibrated.
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, fp8: bool = False
    ) -> None:
        """``shape``: that of each tensor; ``dtype``: of what is written and read. ConfigError for a GPU without FP8."""
        if fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ConfigError(
                "engine: kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or more; set it to auto"
            )
        self.block_size = shape[1]
        self.dtype = dtype
        self.fp8 = fp8
        stored = E4M3 if fp8 else dtype
        self.device, self.num_blocks = device, shape[0]
        halves = [(shape, stored)] * 2 + [(shape[:-1], torch.float32)] * 2 * fp8
        self.layers = [
            PagedCache(*(torch.zeros(size, dtype=each, device=device) for size, each in halves)) for _ in range(layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for cache in self.layers for tensor in cache if tensor is not None)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values [n, kv_heads, head_dim] at slots int64 [n]; returns them as they will be read."""
        cache = self.layers[layer]
        return (
            self._write(cache.keys, cache.key_scales, slots, keys),
            self._write(cache.values, cache.value_scales, slots, values),
        )

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, kv_heads, head_dim] at slots int64 [n]."""
        cache = self.layers[layer]
        return self._read(cache.keys, cache.key_scales, slots), self._read(cache.values, cache.value_scales, slots)

    def _write(
        self, cache: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, new: torch.Tensor
    ) -> torch.Tensor:
        if scales is None:
            cache.flatten(0, 1).index_copy_(0, slots, new)
            return new
        rows = quantize_rows(new.reshape(-1, new.shape[-1]).contiguous())
        stored = rows.values.view(torch.uint8).view(new.shape)  # torch copies no rows of e4m3 by their index
        cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, stored)
        scales.flatten(0, 1).index_copy_(0, slots, rows.scales.view(new.shape[:-1]))
        return rows.dequantized().to(self.dtype).view(new.shape)

    def _read(self, cache: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
        if scales is None:
            return cache.flatten(0, 1).index_select(0, slots)
        stored = cache.view(torch.uint8).flatten(0, 1).index_select(0, slots).view(E4M3)
        return (stored.float() * scales.flatten(0, 1).index_select(0, slots)[..., None]).to(self.dtype)


@dataclass(frozen=True)
class HeadShape:
    """Query heads, key/value heads, and their size."""

    heads: int
    kv_heads: int
    head_dim: int


class LastQueries(NamedTuple):
    """The queries that tokens are chosen from, int64 [m] each: packed rows, contexts, and which sequence's they are."""

    row: np.ndarray
    context: np.ndarray
    sequence: np.ndarray


@dataclass(frozen=True)
class SpanTable:
    """Where each sequence of the batch stands, on the host: int64 [s] each, and block numbers [s, most blocks].

    Sequence i's queries are packed rows [row[i], row[i] + count[i]); they see positions [0, context[i]), the last
    ``count`` of them their own. ``blocks`` is filled up with each one's first.
    """

    row: np.ndarray
    count: np.ndarray
    context: np.ndarray
    blocks: np.ndarray

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return self.row, self.count, self.context, self.blocks

    def last(self, samples: np.ndarray) -> LastQueries:
        """Of each sequence the last ``samples`` (int64 [s]) queries, in their order."""
        sequence = np.repeat(np.arange(len(samples)), samples)
        behind = samples.cumsum()[sequence] - 1 - np.arange(len(sequence))
        return LastQueries((self.row + self.count)[sequence] - 1 - behind, self.context[sequence] - behind, sequence)

    def singles(self, queries: LastQueries) -> SpanTable:
        """The table of these queries alone, each as if of a sequence of its own."""
        count = len(queries.row)
        return SpanTable(np.arange(count), np.ones(count, np.int64), queries.context, self.blocks[queries.sequence])


@dataclass(frozen=True)
class AttentionStep:
    """One step's attention, the same for all layers but the last.

    ``cos`` and ``sin`` float32 [n, head_dim / 2], ``slots`` int64 [n] for the n new tokens. ``rows`` int64 [m]: the
    queries that matter, None for all n; only the last layer drops any. ``plan`` is the backend's own, made for
    those queries.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor | None
    plan: Any


class AttentionBackend(ABC):
    """Attention of one model on one cache."""

    def __init__(self, shape: HeadShape, storage: KvStorage) -> None:
        self.shape = shape
        self.storage = storage
        self.scale = shape.head_dim**-0.5

    @abstractmethod
    def plan(self, table: SpanTable) -> Any:
        """What all layers share for these queries and contexts."""

    def captured_plan(self, context: torch.Tensor, blocks: torch.Tensor, settled: bool = False) -> Any:
        """A plan for one query a sequence that reads ``context`` int64 [s] and ``blocks`` [most, s] on the device.

        A CUDA graph may hold it: whatever stands in them at a replay counts. A sequence of context 0 is a dummy, and
        its slot is -1. ``settled``: of what a query sees the step stores its own key alone. Raises ConfigError in
        backends that need to know the numbers beforehand.
        """
        raise ConfigError(
            f"engine: attention {type(self).__name__} cannot run in CUDA graphs; set graph_batch_size to 0"
        )

    @abstractmethod
    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        """q [m, heads, head_dim] -> the same shape.

        Everything a query sees is in the storage already; k and v [n, kv_heads, head_dim] are the new part of it, as
        the storage gives it back.
        """

    def attend(
        self, layer: int, qkv: torch.Tensor | DeferredProduct, step: AttentionStep, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """qkv [n, (heads + 2 * kv_heads) * head_dim] -> [n or m, heads * head_dim].

        With ``norms`` the heads of q and k are normalised before they are rotated, in ``qkv`` itself.
        """
        qkv = finished(qkv)
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, self.shape.head_dim)
        if norms is not None:
            norm_heads(split[:, :heads], split[:, heads : heads + kv_heads], norms)
        rotated = rotate(split[:, : heads + kv_heads], step.cos, step.sin)
        q, k, v = rotated[:, :heads], rotated[:, heads:], split[:, heads + kv_heads :]
        k, v = self.storage.write(layer, step.slots, k, v)
        if step.rows is not None:
            q = q[step.rows]
        return self._attend(layer, q, k, v, step.plan).flatten(1)


def slots_of(blocks: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slots of positions [.., p] of sequences that hold the blocks [.., most]."""
    return np.take_along_axis(blocks, positions // block_size, axis=-1) * block_size + positions % block_size


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] by cos, sin [n, head_dim / 2] -> a new tensor of x's shape and dtype."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


_BACKENDS = {
    "fixed": "tessera.attention.torch_backend:FixedBackend",
    "fixed_triton": "tessera.attention.triton_backend:FixedTritonBackend",
    "sdpa": "tessera.attention.torch_backend:SdpaBackend",
    "triton": "tessera.attention.triton_backend:TritonBackend",
}


def create_backend(name: str, shape: HeadShape, storage: KvStorage) -> AttentionBackend:
    """The backend called ``name``; "auto" is triton on a GPU, sdpa elsewhere. ConfigError for unknown names."""
    if name == "auto":
        name = "triton" if storage.device.type == "cuda" else "sdpa"
    if name not in _BACKENDS:
        raise ConfigError(f"engine: attention {name!r} is not known; known are auto, {', '.join(_BACKENDS)}")
    return resolve_name(_BACKENDS[name])(shape, storage)
