"""What kernels take: how many rows, a paged cache, products that the next kernel finishes, which saves a launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tessera.kernels.fp8_rows import Fp8Sums

#: the most rows of a product for few rows, in 16 bits or of 4-bit weights, and what divides k of the former
MAX_ROWS, K_MULTIPLE = 64, 64
#: of such a product in e4m3
FP8_MAX_ROWS, FP8_K_MULTIPLE = 256, 128
#: of the fused gate-up product's k and size: TMA wants rows of whole 16 bytes
GATE_UP_MULTIPLE = 8


class PagedCache(NamedTuple):
    """One layer's keys and values [num_blocks, block_size, kv_heads, head_dim].

    In e4m3 they are multiplied by their scales, float32 [num_blocks, block_size, kv_heads].
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class Partials(NamedTuple):
    """A product whose k was shared out among programs: it is the sum of ``parts``, in their order, plus ``bias``."""

    parts: torch.Tensor  # [splits, m, n] float32, or of the product's dtype where m is large
    bias: torch.Tensor | None  # [n]
    dtype: torch.dtype  # of the product

    @property
    def rows(self) -> int:
        return self.parts.shape[1]

    def product(self) -> torch.Tensor:
        """[m, n]."""
        if self.parts.is_cuda:
            from tessera.kernels.fp8 import add_partials

            return add_partials(*self)
        total = self.parts.float().sum(0)
        return (total if self.bias is None else total + self.bias).to(self.dtype)


Unfinished = Fp8Sums | Partials


def finished(product: torch.Tensor | Unfinished) -> torch.Tensor:
    return product if isinstance(product, torch.Tensor) else product.product()
