"""Products that the kernel behind them finishes, which saves a launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tessera.kernels.fp8_rows import Fp8Sums


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
            from tessera.kernels.split_k import add_partials

            return add_partials(*self)
        total = self.parts.float().sum(0)
        return (total if self.bias is None else total + self.bias).to(self.dtype)


Unfinished = Fp8Sums | Partials


def finished(product: torch.Tensor | Unfinished) -> torch.Tensor:
    return product if isinstance(product, torch.Tensor) else product.product()
