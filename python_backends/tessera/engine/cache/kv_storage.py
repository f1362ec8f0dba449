"""The tensors behind the block numbers."""

from __future__ import annotations

import torch


class KvStorage:
    """Keys and values of every layer, each [num_blocks, block_size, kv_heads, head_dim].

    Slot ``block * block_size + offset`` holds one position. The tensors start as zeros: attention may gather
    slots that were never written and mask them, so they must be finite.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """``shape``: that of each tensor."""
        self.block_size = shape[1]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [n, kv_heads, head_dim] at slots int64 [n]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zeros in all layers' blocks, int64 [n]: masked NaN would spread, as 0 times NaN is NaN."""
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, blocks, 0)
