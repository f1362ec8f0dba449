"""A linear layer of a tower in FP8: e4m3 weights, a scale an output channel; a scale a row of what goes in."""

from __future__ import annotations

import torch
from torch import nn

from tessera.fp8.rows import E4M3, LARGEST, Fp8Rows, fp8_linear, quantize_rows, quantize_weight

#: e4m3's largest number of each mantissa, the likeliest last
_LARGEST_BY_MANTISSA = (240.0, 256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0)
_FEW = 32


def requantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As quantize_weight, but a row that was dequantized from e4m3 gets its values back, whatever scale it had.

    Its largest value had one of e4m3's eight mantissas. Divided by a scale that gives it that mantissa again, all of
    its values are numbers of e4m3 (the scale may be the old one times a power of two).
    """
    values, scales = quantize_weight(weight)
    largest = scales * LARGEST
    for number in _LARGEST_BY_MANTISSA:
        nearby = largest / number
        if not _exact(weight[:, :_FEW], nearby, largest)[1].any():  # as with all weights that never were e4m3
            continue
        candidate, exact = _exact(weight, nearby, largest)
        values.view(torch.uint8)[exact] = candidate.view(torch.uint8)[exact]
        scales[exact] = nearby[exact]
    return values, scales


def _exact(weight: torch.Tensor, scales: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in e4m3 by these scales, and for which rows nothing but float32's own rounding is lost."""
    values = (weight / scales[:, None]).to(E4M3)
    error = (values.float() * scales[:, None] - weight).abs().amax(1)
    return values, error <= 1e-6 * largest


class Fp8Linear(nn.Module):
    """Takes rows of any floating dtype, which it quantizes, or Fp8Rows; gives rows of ``dtype``.

    Its tensors are buffers, which ``Module.to(dtype)`` would convert: a tower takes it in when it has its own dtype.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """weight e4m3 [out, in], scales float32 [out], bias [out] of any floating dtype."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.to(dtype))

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear, dtype: torch.dtype, device: torch.device | str) -> Fp8Linear:
        """The layer quantized, on the ``device`` on which it is to stay; without loss where it came from e4m3."""
        weight, scales = requantized(linear.weight.detach().to(device))
        return cls(weight, scales, None if linear.bias is None else linear.bias.detach().to(device), dtype)

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if isinstance(x, torch.Tensor):
            shape, rows = x.shape, quantize_rows(x.reshape(-1, self.in_features))
        else:
            shape, rows = x.values.shape, Fp8Rows(x.values.flatten(0, -2), x.scales.flatten(0, -2))
        return fp8_linear(rows, self.weight, self.scales, self.bias, self.dtype).unflatten(0, shape[:-1])
