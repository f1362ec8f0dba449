"""The tensors behind the block numbers."""

from __future__ import annotations

import torch


class KvStorage:
    """Keys and values of every layer, each [num_blocks, block_size, kv_heads, head_dim].

    Slot ``block * block_size + offset`` holds one position. The tensors start as zeros: attention may gather
    slots that were never written and mask them, so they must be finite.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, kv_heads, head_dim)
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    @staticmethod
    def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [n, kv_heads, head_dim] at slots int64 [n]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zeros in all layers' blocks, int64 [n]: masked NaN would spread, as 0 times NaN is NaN."""
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, blocks, 0)
