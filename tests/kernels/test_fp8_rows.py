"""e4m3 rows and products: the twins against arithmetic spelt out, the kernel against its twin."""

from __future__ import annotations

import pytest
import torch

from tessera.kernels.fp8_rows import E4M3, Fp8Rows, fp8_linear, fp8_sums, quantize_rows, quantize_weight, rescale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32]


def table() -> torch.Tensor:
    """All finite values of e4m3 that are not negative, ascending."""
    return torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)


def test_a_row_takes_the_nearest_values_of_its_scale():
    x = torch.tensor([[448.0, -3.3, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [-896.0, 1.0, 30.0, 2.5]]).to(DEVICE)
    rows = quantize_rows(x)
    assert rows.values.dtype == E4M3 and rows.scales.dtype == torch.float32
    assert rows.scales.flatten().tolist() == pytest.approx([1.0, 1e-12, 2.0])
    nearest = table()[(x.abs().cpu() / rows.scales.cpu()).unsqueeze(-1).sub(table()).abs().argmin(-1)]
    assert torch.equal(rows.values.float().cpu(), nearest * x.sign().cpu())
    assert rows.dequantized().cpu().tolist()[2] == pytest.approx([-896.0, 1.0, 30.0, 2.5])


def test_a_static_scale_saturates():
    x = torch.tensor([[1.0, -2.0, 1000.0, -1e30]]).to(DEVICE)
    rows = quantize_rows(x, torch.tensor(0.5, device=DEVICE))
    assert rows.scales.tolist() == [[0.5]]
    assert rows.values.float().tolist() == [[2.0, -4.0, 448.0, -448.0]]


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


class TestKernel:
    """Compiled on a GPU, interpreted elsewhere."""

    @pytest.fixture(autouse=True)
    def _triton(self) -> None:
        pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

    def rows(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Fp8Rows:
        """The interpreter's cast to e4m3 loses carries: there the kernel stores float32, and torch does the cast."""
        from tessera.kernels import fp8

        values = torch.full_like(x, float("nan"), dtype=E4M3 if torch.cuda.is_available() else torch.float32)
        scales = torch.full((len(x), 1), float("nan"), device=x.device)
        fp8.quantize_rows(x, scale, values, scales)
        return Fp8Rows(values.to(E4M3), scales)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 3584), (2, 18944), (5, 100), (0, 8)])
    def test_equals_its_twin(self, dtype, n, size):
        x = normal(n, size, dtype=dtype) * torch.linspace(0.01, 30, n, device=DEVICE).to(dtype)[:, None]
        if n > 1:
            x[1] = 0
        actual, expected = self.rows(x), quantize_rows(x.cpu())
        assert torch.equal(actual.scales.cpu(), expected.scales)
        assert torch.equal(actual.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))

    def test_equals_its_twin_with_a_static_scale(self):
        x, scale = normal(3, 200) * 300, torch.tensor(0.7, device=DEVICE)
        actual, expected = self.rows(x, scale), quantize_rows(x.cpu(), scale.cpu())
        assert torch.equal(actual.scales.cpu(), expected.scales)
        assert torch.equal(actual.values.cpu().float(), expected.values.float())

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("m", "n"), [(1, 16), (3, 1030), (0, 16)])
    @pytest.mark.parametrize("has_bias", [True, False])
    def test_rescale(self, dtype, m, n, has_bias):
        from tessera.kernels import fp8

        sums, scales = normal(m, n, dtype=dtype) * 100, normal(n).abs()
        x_scales = torch.linspace(0.1, 2, m, device=DEVICE)[:, None]
        bias = normal(n, dtype=dtype) if has_bias else None
        expected = sums.double() * x_scales * scales + (0 if bias is None else bias.double())
        out = fp8.rescale(sums, x_scales, scales, bias)
        assert out is sums
        torch.testing.assert_close(out.double(), expected, rtol=2e-6 if dtype == torch.float32 else 1e-3, atol=1e-5)

    def test_refuses_rows_that_are_too_wide_or_strided(self):
        from tessera.kernels import fp8

        for x in (torch.ones(1, 32769), torch.ones(16, 2).T):
            with pytest.raises(ValueError, match="contiguous rows of at most 32768"):
                fp8.quantize_rows(x, None, x, x)
