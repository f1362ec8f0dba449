"""What the kernels compute, in plain torch: the same names, arguments and roundings."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_layer_norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, update [..., size], weight, bias [size] -> (normalised sum, sum); without an update the sum is x."""
    if update is not None:
        x = x + update
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps), x
