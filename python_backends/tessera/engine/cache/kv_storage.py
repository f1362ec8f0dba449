"""The tensors behind the block numbers."""

from __future__ import annotations

import torch


class KvStorage:
    """Keys and values of every layer, each [num_blocks, block_size, kv_heads, head_dim].

    Slot ``block * block_size + offset`` holds one position. What lies behind a sequence's context is somebody else's
    and may be NaN: attention does not read it, not even to mask it, as 0 times NaN is NaN.
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
