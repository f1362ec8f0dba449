"""The tensors behind the block numbers."""

from __future__ import annotations

import math

import torch

from tessera.errors import ConfigError
from tessera.kernels.fp8_rows import E4M3, quantize_rows
from tessera.kernels.operands import PagedCache


class KvStorage:
    """Keys and values of every layer: ``layers``. Their shape is [num_blocks, block_size, kv_heads, head_dim].

    Slot ``block * block_size + offset`` holds one position. What lies behind a sequence's context is somebody else's
    and may be NaN: attention does not read it, not even to mask it, as 0 times NaN is NaN.

    In ``fp8`` they are e4m3, to be multiplied by scales, one float32 a position and head,
    [num_blocks, block_size, kv_heads]: so keys beyond e4m3's 448, as the biased ones of Qwen2 may be, do not saturate,
    small values keep their bits, and nothing is calibrated.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
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

    @staticmethod
    def bytes_per_block(layers: int, block: tuple[int, int, int], dtype: torch.dtype, fp8: bool) -> int:
        """What a block of this shape [block_size, kv_heads, head_dim] takes in all layers."""
        a_head = block[-1] + torch.float32.itemsize if fp8 else block[-1] * dtype.itemsize
        return 2 * layers * math.prod(block[:-1]) * a_head

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
