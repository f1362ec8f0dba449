"""Products that fetch their weights early, against their twins, and how they are planned."""

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.operands import EARLY_WARPS, EarlyProduct, NormedRows, PagedCache, plan_early

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.early_linear import early_gate_up, early_linear
from tessera.kernels.rotary import rotate_and_store

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CLOSE = {"rtol": 4e-3, "atol": 4e-3}
# One block of k, three, and seven of the least; the widest programs, narrow ones, and one.
SHAPES = [(64, 256), (48, 384), (16, 896)]


def nearly(half):
    """Where rows are multiplied by the norm's weight and rounded before they are divided, not after."""
    return dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(half).eps)


def operands(half, device, generator, m, n, k, std=1.0):
    """x [m, k] and weight [n, k] whose products are about 1."""
    x = torch.randn((m, k), dtype=half, device=device, generator=generator) * std
    return x, torch.randn((n, k), dtype=half, device=device, generator=generator) / k**0.5


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 10, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product(half, device, generator, m, n, k, bias):
    x, weight = operands(half, device, generator, m, n, k)
    given = torch.randn(n, dtype=half, device=device, generator=generator) if bias else None
    torch.testing.assert_close(early_linear(x, weight, given), reference.early_linear(x, weight, given), **CLOSE)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 10])
def test_the_residual_is_added_in_place(half, device, generator, m, n, k):
    x, weight = operands(half, device, generator, m, n, k)
    residual = torch.randn((m, n), dtype=half, device=device, generator=generator)
    expected = reference.early_linear(x, weight, None, residual.clone())
    assert early_linear(x, weight, None, residual) is residual
    torch.testing.assert_close(residual, expected, **CLOSE)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 10])
@pytest.mark.parametrize("std", [0.01, 30.0])
def test_rows_are_normalised(half, device, generator, m, n, k, std):
    """Rows of any size, as the norm makes them alike."""
    x, weight = operands(half, device, generator, m, n, k, std)
    rows = NormedRows(x, torch.rand(k, dtype=half, device=device, generator=generator) + 0.5, 1e-6)
    before = x.clone()
    torch.testing.assert_close(early_linear(rows, weight), reference.early_linear(rows, weight), **nearly(half))
    active = early_gate_up(rows, weight)
    torch.testing.assert_close(active, reference.early_gate_up(rows, weight), **nearly(half))
    assert torch.equal(x, before)


def test_the_gate_comes_first(half, device, generator):
    x, weight = operands(half, device, generator, 3, 64, 256)
    torch.testing.assert_close(early_gate_up(x, weight), reference.early_gate_up(x, weight), **CLOSE)


def test_a_row_does_not_depend_on_the_others(half, device, generator):
    x, weight = operands(half, device, generator, 9, 32, 256)
    expected = early_linear(x, weight)
    x[1:] = float("nan")
    assert torch.equal(early_linear(x, weight)[0], expected[0])


@pytest.mark.parametrize(("size", "bias"), [(64, False), (64, True), (80, True), (16, False)])
def test_queries_and_keys_are_rotated_and_stored(half, device, generator, size, bias):
    """Of four heads, two key heads; the second token is nobody's."""
    x, weight = operands(half, device, generator, 3, 8 * size, 256)
    given = torch.randn(8 * size, dtype=half, device=device, generator=generator) if bias else None
    angles = torch.rand((3, size // 2), device=device, generator=generator) * 6
    slots = torch.tensor([17, -1, 3], device=device)
    found, expected = (PagedCache(*torch.zeros((2, 2, 16, 2, size), dtype=half, device=device)) for _ in range(2))
    rows = NormedRows(x, torch.ones(256, dtype=half, device=device), 1e-6)
    product = EarlyProduct(rows, weight, given)
    qkv = rotate_and_store(product, angles.cos(), angles.sin(), slots, found, 4)
    twin = reference.early_linear(rows, weight, given)
    twin = reference.rotate_and_store(twin, angles.cos(), angles.sin(), slots, expected, 4)
    for actual, wanted in ((qkv, twin), *zip(found[:2], expected[:2])):
        torch.testing.assert_close(actual, wanted, **nearly(half))


def test_a_product_that_is_not_begun(half, device, generator):
    x, weight = operands(half, device, generator, 5, 32, 256)
    product = EarlyProduct(x, weight, None)
    assert product.rows == 5
    torch.testing.assert_close(product.product(), x @ weight.T, **CLOSE)
    residual = torch.ones((5, 32), dtype=half, device=device)
    torch.testing.assert_close(product.added_to(residual), 1 + x @ weight.T, **CLOSE)


def test_plans_hold_the_weights():
    for n, k in [(2560, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1152, 896), (9728, 896), (896, 4864)]:
        plan = plan_early(n, k)
        assert plan is not None and n % plan.columns == 0 and k % plan.block_k == 0
        assert plan.columns * k <= 48 * 1024 and plan.block_k // EARLY_WARPS % 32 == 0
    assert plan_early(1024, 12288) is None and plan_early(1024, 1000) is None and plan_early(1020, 1024) is None
    assert plan_early(1024, 4864, gated=True) is None  # gates and their ups would be fewer than eight each


@pytest.mark.parametrize(("x", "weight"), [((17, 256), (32, 256)), ((2, 256), (32, 128)), ((2, 192), (32, 192))])
def test_what_does_not_fit_is_refused(half, device, x, weight):
    with pytest.raises(ValueError, match="early_linear"):
        early_linear(torch.zeros(x, dtype=half, device=device), torch.zeros(weight, dtype=half, device=device))


def test_other_dtypes_are_refused(device):
    with pytest.raises(ValueError, match="16 bits"):
        early_linear(torch.zeros((2, 256), device=device), torch.zeros((32, 256), device=device))
