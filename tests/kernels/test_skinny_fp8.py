"""The skinny products in e4m3 against their twin, and how they are planned."""

from __future__ import annotations

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows, quantize_weight

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.skinny_linear import SkinnyPlan, plan_skinny_fp8, skinny_fp8

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]


def operands(device, generator, m, n, k):
    """Rows of x and channels of a weight, of very different magnitudes, whose products are of the order of 1."""
    x = torch.randn((m, k), device=device, generator=generator) * torch.logspace(-1, 1, m, device=device)[:, None]
    weight = torch.randn((n, k), device=device, generator=generator) / k**0.5
    return quantize_rows(x), *quantize_weight(weight * torch.logspace(-1, 1, n, device=device)[:, None])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize("m", [1, 5, 16, 17, 33, 64, 65, 97, 200, 256])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(half, device, generator, m, has_bias):
    rows, weight, scales = operands(device, generator, m, 96, 256)
    bias = torch.randn(96, dtype=half, device=device, generator=generator) if has_bias else None
    out = skinny_fp8(rows, weight, scales, bias, half)
    assert out.dtype == half
    close(out, reference.skinny_fp8(rows, weight, scales, bias, half))


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize(("block_n", "n"), [(16, 40), (64, 64), (128, 130)])
def test_linear_with_splits_and_odd_columns(half, device, generator, splits, block_n, n):
    rows, weight, scales = operands(device, generator, 3, n, 640)
    bias = torch.randn(n, dtype=half, device=device, generator=generator)
    plan = SkinnyPlan(block_n, 128, splits)
    close(skinny_fp8(rows, weight, scales, bias, half, plan), reference.skinny_fp8(rows, weight, scales, bias, half))


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize(("m", "block_m"), [(65, 32), (97, 64), (200, 128), (255, 128), (255, 256)])
def test_linear_in_blocks_of_rows(half, device, generator, splits, m, block_m):
    rows, weight, scales = operands(device, generator, m, 72, 640)
    bias = torch.randn(72, dtype=half, device=device, generator=generator)
    plan = SkinnyPlan(64, 128, splits, block_m=block_m)
    actual, expected = (
        product(rows, weight, scales, bias, half, *given).float() - bias
        for product, given in ((skinny_fp8, [plan]), (reference.skinny_fp8, []))
    )
    # A split's sums are rounded to half before they are added, each of the order of row's and column's magnitude.
    size = torch.logspace(-1, 1, m, device=device)[:, None] * torch.logspace(-1, 1, 72, device=device) + bias.abs()
    step = torch.finfo(half).eps
    torch.testing.assert_close(actual / size, expected / size, rtol=2 * step, atol=2 * step)


def test_a_row_does_not_depend_on_its_neighbours(half, device, generator):
    rows, weight, scales = operands(device, generator, 16, 64, 256)
    plan = SkinnyPlan(32, 128, 2)
    whole = skinny_fp8(rows, weight, scales, None, half, plan)
    rows.scales[1:] = float("nan")
    assert torch.equal(skinny_fp8(rows, weight, scales, None, half, plan)[0], whole[0])
    one = Fp8Rows(rows.values[:1], rows.scales[:1])
    assert torch.equal(skinny_fp8(one, weight, scales, None, half, plan)[0], whole[0])


@pytest.mark.parametrize(
    ("m", "k", "dtype", "message"),
    [
        (257, 128, None, "1..256"),
        (0, 128, None, "1..256"),
        (2, 192, None, "multiple of 128"),
        (2, 128, torch.float16, "float8_e4m3fn"),
    ],
)
def test_refuses(device, generator, m, k, dtype, message):
    rows, weight, scales = operands(device, generator, max(m, 1), 16, k)
    rows = Fp8Rows(rows.values[:m], rows.scales[:m])
    with pytest.raises(ValueError, match=message):
        skinny_fp8(rows, weight.to(dtype or weight.dtype), scales, None, torch.float16)


def test_refuses_a_plan_that_does_not_fit(device, generator):
    rows, weight, scales = operands(device, generator, 2, 16, 384)
    with pytest.raises(ValueError, match="does not fit"):
        skinny_fp8(rows, weight, scales, None, torch.float16, SkinnyPlan(16, 256))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 16, 32, 64])
def test_plans_fill_the_gpu(m, n, k):
    plan = plan_skinny_fp8(m, n, k, 132)
    assert k % plan.block_k == 0 and plan.splits <= k // plan.block_k
    assert -(-n // plan.block_n) * plan.splits >= 1.5 * 132
    assert plan.stages * plan.block_k * (plan.block_n + max(m, 16)) <= 100 * 1024  # two programs fit


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [65, 96, 128, 192, 256])
def test_plans_of_many_rows_have_a_multiprocessor_each(m, n, k):
    plan = plan_skinny_fp8(m, n, k, 132)
    tiles = -(-n // plan.block_n) * -(-m // plan.block_m)
    assert k % plan.block_k == 0 and plan.splits <= k // plan.block_k
    assert tiles >= 132 or 132 // 2 < tiles * plan.splits <= 132, "splits only where one wave does all"
    assert plan.stages * plan.block_k * (plan.block_n + plan.block_m) <= 192 * 1024


@pytest.mark.parametrize("m", [17, 32, 64])
def test_all_programs_of_a_large_weight_fit_at_once(m):
    plan = plan_skinny_fp8(m, 37888, 3584, 132)
    each = plan.stages * plan.block_k * (plan.block_n + (32 if m <= 32 else 64))
    assert 37888 // plan.block_n <= 132 * (227 * 1024 // each)


@pytest.mark.parametrize("m", [17, 64])
def test_linear_as_planned_for_a_large_weight(half, device, generator, m):
    rows, weight, scales = operands(device, generator, m, 200, 256)
    plan = plan_skinny_fp8(m, 37888, 256, 132)
    assert plan.stages == 3
    close(skinny_fp8(rows, weight, scales, None, half, plan), reference.skinny_fp8(rows, weight, scales, None, half))
