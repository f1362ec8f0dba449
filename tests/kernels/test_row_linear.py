"""The product of which each row's bits are its own, against torch's, and that it compiles for Hopper."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.fp8_rows import Fp8Rows
from tessera.kernels.row_linear import RowPlan, row_linear, row_product

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def rows_of(dtype, device, generator, rows, k):
    """[rows, k] with not-a-numbers behind it."""
    memory = torch.randn((rows + 9, k), device=device, generator=generator).to(dtype)
    memory[rows:] = float("nan")
    return memory[:rows]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "n", "k"), [((0,), 16, 16), ((1,), 80, 96), ((3, 30), 40, 72), ((150,), 64, 588)])
def test_it_is_a_linear_layer(half, device, generator, shape, n, k, biased):
    m = torch.Size(shape).numel()
    x, weight = rows_of(half, device, generator, m, k).view(*shape, k), rows_of(half, device, generator, n, k) / k**0.5
    bias = rows_of(half, device, generator, n, 1)[:, 0] if biased else None
    found, expected = row_linear(x, weight, bias), F.linear(x.float(), weight.float(), bias.float() if biased else None)
    assert found.dtype == half and found.is_contiguous()
    step = torch.finfo(half).eps
    torch.testing.assert_close(found.float(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("plan", [None, RowPlan(32, 16, 32, group=2)], ids=["default", "small"])
@pytest.mark.parametrize("biased", [False, True])
def test_scales_of_rows_meet_the_sums(half, device, generator, plan, biased):
    """Of numbers that e4m3 holds, in 16 bits, as the interpreter has no products of that type."""
    m, n, k = 70, 80, 96
    x, weight = (torch.randint(-8, 9, (rows, k), device=device, generator=generator).to(half) for rows in (m, n))
    scales, x_scales = (torch.rand(rows, device=device, generator=generator) / 64 for rows in (n, m))
    bias = rows_of(half, device, generator, n, 1)[:, 0] if biased else None
    rows = Fp8Rows(x, x_scales[:, None])
    found = row_product(rows, weight, scales, bias, half, plan)
    expected = (x.float() @ weight.float().T) * (x_scales[:, None] * scales) + (bias.float() if biased else 0)
    step = torch.finfo(half).eps
    torch.testing.assert_close(found.float(), expected, rtol=step, atol=step)
