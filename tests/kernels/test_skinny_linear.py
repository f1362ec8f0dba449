"""The skinny products, of 16 bits and in e4m3, against their twins, and how they are planned."""

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.fp8_rows import Fp8Rows, quantize_rows, quantize_weight
from tessera.kernels.operands import finished

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.skinny_linear import (
    SkinnyPlan,
    check_plan,
    padded_rows,
    plan_skinny,
    plan_skinny_fp8,
    plan_skinny_gate_up,
    skinny_deferred,
    skinny_fp8,
    skinny_gate_up,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def operands(half, device, generator, m, n, k):
    """x [m, k] and weight [n, k] whose products are about 1."""
    x = torch.randn((m, k), dtype=half, device=device, generator=generator)
    return x, torch.randn((n, k), dtype=half, device=device, generator=generator) / k**0.5


def fp8_operands(device, generator, m, n, k):
    """Rows of x and channels of a weight, of very different magnitudes, whose products are of the order of 1."""
    x = torch.randn((m, k), device=device, generator=generator) * torch.logspace(-1, 1, m, device=device)[:, None]
    weight = torch.randn((n, k), device=device, generator=generator) / k**0.5
    return quantize_rows(x), *quantize_weight(weight * torch.logspace(-1, 1, n, device=device)[:, None])


class Halves:
    """A product of 16 bits."""

    unit = 64  # of k

    def __init__(self, half, device, generator, m, n, k):
        self.x, self.weight = operands(half, device, generator, m, n, k)

    def run(self, bias, plan=None, rows=slice(None)):
        return finished(skinny_deferred(self.x[rows], self.weight, bias, plan))

    def expected(self, bias):
        product = self.x.float() @ self.weight.float().T
        return product if bias is None else product + bias.float()

    def spoil(self):
        self.x[1:] = float("nan")


class E4m3:
    """A product of FP8 rows."""

    unit = 128

    def __init__(self, half, device, generator, m, n, k):
        self.half, (self.x, *self.weight) = half, fp8_operands(device, generator, m, n, k)

    def run(self, bias, plan=None, rows=slice(None)):
        return skinny_fp8(Fp8Rows(*(each[rows] for each in self.x)), *self.weight, bias, self.half, plan)

    def expected(self, bias):
        return reference.skinny_fp8(self.x, *self.weight, bias, self.half)

    def spoil(self):
        self.x.scales[1:] = float("nan")


KINDS = pytest.mark.parametrize("kind", [Halves, E4m3])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "m"), [*((Halves, m) for m in (1, 16, 17, 64)), *((E4m3, m) for m in (1, 17, 64, 97, 256))]
)
def test_linear(half, device, generator, kind, m, has_bias):
    product = kind(half, device, generator, m, 96, 256)
    bias = torch.randn(96, dtype=half, device=device, generator=generator) if has_bias else None
    out = product.run(bias)
    assert out.dtype == half
    close(out, product.expected(bias))


@KINDS
@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize(("block_n", "n"), [(16, 40), (64, 64), (128, 130)])
def test_linear_with_splits_and_odd_columns(half, device, generator, kind, splits, block_n, n):
    # Five steps of k: they divide evenly among 1 and 5 splits only.
    product = kind(half, device, generator, 3, n, 5 * kind.unit)
    bias = torch.randn(n, dtype=half, device=device, generator=generator)
    close(product.run(bias, SkinnyPlan(block_n, kind.unit, splits)), product.expected(bias))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("m", "block_m"), [(65, 32), (255, 128)])
def test_linear_in_blocks_of_rows(half, device, generator, splits, m, block_m):
    rows, weight, scales = fp8_operands(device, generator, m, 72, 640)
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


@KINDS
def test_a_row_does_not_depend_on_its_neighbours(half, device, generator, kind):
    product, plan = kind(half, device, generator, 16, 64, 256), SkinnyPlan(32, kind.unit, 2)
    whole = product.run(None, plan)
    product.spoil()
    for rows in (slice(None), slice(1)):
        assert torch.equal(product.run(None, plan, rows)[0], whole[0])


@pytest.mark.parametrize(
    ("m", "size", "plan"),
    [
        *((m, size, None) for m in (1, 20, 64) for size in (16, 50)),
        *((3, 70, plan) for plan in (SkinnyPlan(16, 64), SkinnyPlan(64, 128, stages=2), SkinnyPlan(128, 64, warps=8))),
    ],
)
def test_gate_up(half, device, generator, m, size, plan):
    x, weight = operands(half, device, generator, m, 2 * size, 256)
    close(skinny_gate_up(x, weight, plan), reference.skinny_gate_up(x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(65, 64).half(), torch.ones(8, 64).half(), r"not \[65, 64\]"),
        (torch.ones(0, 64).half(), torch.ones(8, 64).half(), r"not \[0, 64\]"),
        (torch.ones(2, 96).half(), torch.ones(8, 96).half(), "multiple of 64"),
        (torch.ones(2, 64).half(), torch.ones(8, 128).half(), r"\[8, 128\]"),
        (torch.ones(2, 64), torch.ones(8, 64), "bfloat16 or both float16"),
        (torch.ones(2, 64).half(), torch.ones(8, 64).bfloat16(), "bfloat16 or both float16"),
        (torch.ones(2, 64).half(), torch.ones(64, 8).half().T, "contiguous"),
    ],
)
def test_refuses_operands(x, weight, message):
    for product in (skinny_deferred, skinny_gate_up):
        with pytest.raises(ValueError, match=message):
            product(x, weight)


@KINDS
def test_refuses_plans(half, device, generator, kind):
    product = kind(half, device, generator, 2, 8, 3 * kind.unit)
    for plan in (SkinnyPlan(16, 2 * kind.unit), SkinnyPlan(16, kind.unit, splits=4)):
        with pytest.raises(ValueError, match=f"does not fit k = {3 * kind.unit}"):
            product.run(None, plan)
    with pytest.raises(ValueError, match="splits"):
        skinny_gate_up(*operands(half, device, generator, 2, 8, 192), plan=SkinnyPlan(16, 64, splits=2))


@pytest.mark.parametrize(
    ("m", "k", "dtype", "message"),
    [
        (257, 128, None, "1..256"),
        (0, 128, None, "1..256"),
        (2, 192, None, "multiple of 128"),
        (2, 128, torch.float16, "float8_e4m3fn"),
    ],
)
def test_fp8_refuses(device, generator, m, k, dtype, message):
    rows, weight, scales = fp8_operands(device, generator, max(m, 1), 16, k)
    rows = Fp8Rows(rows.values[:m], rows.scales[:m])
    with pytest.raises(ValueError, match=message):
        skinny_fp8(rows, weight.to(dtype or weight.dtype), scales, None, torch.float16)


@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64, 65, 97, 256])
@pytest.mark.parametrize("sms", [1, 60, 132])
def test_plans_are_possible(m, sms):
    for n, k in ((4608, 3584), (37888, 3584), (3584, 18944), (151680, 3584), (8, 128), (100, 384)):
        plans = {"fp8": plan_skinny_fp8(m, n, k, sms)}
        if m <= 64:
            plans |= {"halves": plan_skinny(m, n, k, sms), "gate_up": plan_skinny_gate_up(m, n // 2, k, sms)}
            assert plans["gate_up"].splits == 1
        for kind, plan in plans.items():
            check_plan(plan, k)
            rows, size = min(padded_rows(m), plan.block_m), 1 if kind == "fp8" else 2
            assert plan.stages * size * plan.block_k * (plan.block_n + rows) <= 227 * 1024, "a multiprocessor's memory"
            assert plan.splits == 1 or 8 * plan.splits * min(m, 64) <= k, "partials are few beside the weights"
