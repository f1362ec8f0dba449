"""Rows of activations and channels of weights in e4m3, each with a scale of its own, and the product of the two.

e4m3 has three bits of mantissa and ends at 448: a row divided by its largest magnitude / 448 uses all of its range.
On a GPU this runs in triton and on Hopper's FP8 units (:mod:`tessera.kernels.fp8`, ``torch._scaled_mm``); elsewhere
the twins here compute the same numbers in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from tessera.kernels.fixed_rows import fixed
from tessera.kernels.tuning import layer_kernels

E4M3 = torch.float8_e4m3fn
ROWS_DTYPE = E4M3  # what kernels write rows in; the interpreter's cast to e4m3 loses carries, so its tests replace it
LARGEST = 448.0
SMALLEST_SCALE = 1e-12
#: rows and columns of a weight that ``torch._scaled_mm`` takes
MULTIPLE = 16
# cuBLAS 13.0 has no product with scales a row, a bias, few rows and a long k: seen failing up to 64 rows.
_BIAS_FROM = 128


class Fp8Rows(NamedTuple):
    """Row i is ``values[i] * scales[i]``."""

    values: torch.Tensor  # float8_e4m3fn [n, size]
    scales: torch.Tensor  # float32 [n, 1]

    def dequantized(self) -> torch.Tensor:
        """float32 [n, size]."""
        return self.values.float() * self.scales


class Fp8Sums(NamedTuple):
    """A product of e4m3 values that still lacks the scales: it is ``sums * x_scales * scales + bias``."""

    sums: torch.Tensor  # [m, n]
    x_scales: torch.Tensor  # float32 [m, 1]
    scales: torch.Tensor  # float32 [n]
    bias: torch.Tensor | None = None  # [n]

    @property
    def rows(self) -> int:
        return len(self.sums)

    def product(self) -> torch.Tensor:
        """[m, n]; on a GPU in the memory of the sums."""
        return rescale(*self)


def empty_rows(shape: Sequence[int], device: torch.device) -> Fp8Rows:
    """Memory for values [..., size] and their scales [..., 1]."""
    values = torch.empty(shape, dtype=ROWS_DTYPE, device=device)
    return Fp8Rows(values, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device))


def empty_like(x: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for a kernel's rows of x's shape: quantized values and their scales, or of x's dtype and None."""
    return empty_rows(x.shape, x.device) if fp8 else (torch.empty_like(x), None)


def rows_or_tensor(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | Fp8Rows:
    return values if scales is None else Fp8Rows(values, scales)


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> Fp8Rows:
    """x [n, size] of any floating dtype, contiguous -> its rows in e4m3.

    Each row's scale is its largest magnitude / 448, at least 1e-12; the values are multiplied by 1 / scale, rounded to
    float32, as that costs one division a row. A given ``scale`` (float32, one value) is taken for all rows instead,
    and what exceeds 448 of it saturates: static quantization.
    """
    if x.is_cuda:
        from tessera.kernels import fp8

        rows = empty_rows(x.shape, x.device)
        fp8.quantize_rows(x, scale, *rows)
        return rows
    wide = x.float()
    if scale is None:
        scales = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    else:
        scales = scale.float().reshape(1, 1).expand(len(x), 1).contiguous()
    return Fp8Rows((wide * scales.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3), scales)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, k] -> e4m3 [n, k] and float32 [n], one scale an output channel."""
    values, scales = quantize_rows(weight.contiguous())
    return values, scales.squeeze(1)


def fp8_linear(
    x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [m, k], weight e4m3 [n, k], its scales float32 [n], bias [n] -> x W^T + b [m, n] of ``dtype``.

    On a GPU n and k must be multiples of 16 and ``dtype``, the bias's too, bfloat16.
    """
    if not len(x.values):
        return torch.empty((0, len(weight)), dtype=dtype, device=weight.device)
    if weight.is_cuda and fixed():
        return layer_kernels("cuda").row_product(x, weight, scales, bias, dtype)
    if weight.is_cuda and bias is not None and len(x.values) < _BIAS_FROM:
        return rescale(fp8_sums(x, weight, dtype), x.scales, scales, bias)
    if weight.is_cuda:
        return torch._scaled_mm(
            x.values,
            weight.t(),
            scale_a=x.scales,
            scale_b=scales.unsqueeze(0),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    product = x.dequantized() @ (weight.float() * scales.unsqueeze(1)).t()
    return (product if bias is None else product + bias.float()).to(dtype)


def fp8_sums(x: Fp8Rows, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [m, k], weight e4m3 [n, k] -> the products of the values alone, without the scales, [m, n] of ``dtype``.

    cuBLAS has many more kernels for this than for products with scales a row, among them such that split k: from one
    row to some hundreds it is the faster way, even with :func:`rescale` after it.
    """
    if not len(x.values):
        return torch.empty((0, len(weight)), dtype=dtype, device=weight.device)
    if weight.is_cuda:
        one = _one(weight.device)
        return torch._scaled_mm(x.values, weight.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=True)
    return (x.values.float() @ weight.float().t()).to(dtype)


@cache
def _one(device: torch.device) -> torch.Tensor:
    """Made once: filling it would be a kernel before each product."""
    return torch.ones((), device=device)


def rescale(
    sums: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """sums [m, n] of :func:`fp8_sums` -> the product, x_scales [m, 1] and scales [n] applied and bias [n] added."""
    if sums.is_cuda:
        from tessera.kernels import fp8

        return fp8.rescale(sums, x_scales, scales, bias)
    product = sums.float() * (x_scales * scales)
    return (product if bias is None else product + bias.float()).to(sums.dtype)
