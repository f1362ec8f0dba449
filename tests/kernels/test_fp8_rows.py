"""Products of e4m3 rows against arithmetic spelt out."""

import pytest
import torch

from tessera.kernels.fp8_rows import fp8_linear, fp8_sums, quantize_rows, quantize_weight, rescale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)


def test_what_is_no_number_shows_in_the_product():
    x = normal(3, 32)
    x[0, 3], x[2, 5] = float("nan"), float("inf")
    weight, scales = quantize_weight(normal(16, 32))
    out = fp8_linear(quantize_rows(x.bfloat16()), weight, scales, None, torch.bfloat16)
    assert out.isfinite().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_multiplies_what_the_values_stand_for(has_bias):
    weight, scales = quantize_weight(normal(48, 64) * torch.linspace(0.1, 9, 48, device=DEVICE)[:, None])
    assert scales.shape == (48,)
    rows = quantize_rows(normal(7, 64) * 3)
    bias = normal(48, dtype=torch.bfloat16) if has_bias else None
    expected = rows.dequantized().double() @ (weight.double() * scales[:, None]).t()
    if bias is not None:
        expected += bias.double()
    out = fp8_linear(rows, weight, scales, bias, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    # A GPU adds a bias to few rows after a first rounding.
    torch.testing.assert_close(out.double(), expected, rtol=2**-7 if DEVICE.type == "cuda" else 2**-8, atol=2e-3)
    # The same, with the scales applied after the product: two roundings.
    out = rescale(fp8_sums(rows, weight, torch.bfloat16), rows.scales, scales, bias)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=4e-3)
