"""The elementwise kernels against their twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tessera.kernels import reference

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.fp8_rows import E4M3, Fp8Rows, Fp8Sums, quantize_rows
from tessera.kernels.norm import add_rms_norm, norm_heads
from tessera.kernels.operands import PagedCache, Partials
from tessera.kernels.rotary import rotate_and_store

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-6
FLOAT32 = torch.finfo(torch.float32).eps


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two roundings in the tensors' own dtype apart at most; the sums' order is the kernel's own.

    A GPU fuses a product with the sum that it goes into. Where two terms cancel, that last bit is the terms', not the
    sum's: as large as that of the largest value, twice.
    """
    step = torch.finfo(actual.dtype).eps
    terms = 2 * FLOAT32 * expected.abs().amax().item() if actual.is_cuda and actual.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=max(2 * step, 2e-6), atol=max(2e-6, terms))


def same_but_for_ties(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Numbers of e4m3, as float32: what lay between two of them may come to either where a bit before was another."""
    torch.testing.assert_close(actual, expected, rtol=2**-3, atol=2**-9)
    assert (actual == expected).float().mean() > 0.98


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 3584), (5, 100), (2, 8192)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm(dtype, device, generator, n, size, has_residual):
    x, residual = torch.randn((2, n, size), dtype=dtype, device=device, generator=generator) * 3
    weight = torch.randn(size, dtype=dtype, device=device, generator=generator)
    given = residual.clone() if has_residual else None
    expected, expected_sum = reference.add_rms_norm(x.clone(), given.clone() if has_residual else None, weight, EPS)
    actual, total = add_rms_norm(x, given, weight, EPS)
    assert total is (given if has_residual else x)
    assert torch.equal(total, expected_sum)
    close(actual, expected)


def test_add_rms_norm_rounds_the_sum_first(half, device):
    # 2048 + 1 is not a number of either dtype: statistics of the unrounded sum would differ in every digit.
    residual = torch.full((1, 16), 2048.0, dtype=half, device=device)
    x = torch.ones_like(residual)
    normalised, total = add_rms_norm(x, residual, torch.ones(16, dtype=half, device=device), 2048.0**2)
    assert torch.equal(total, torch.full_like(total, 2048))
    close(normalised, torch.full_like(normalised, 0.5**0.5))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "n"), [(4, 2, 128, 3), (7, 1, 64, 2), (1, 1, 16, 1), (3, 3, 96, 2), (2, 1, 16, 0)]
)
def test_norm_heads(dtype, device, generator, heads, kv_heads, size, n):
    qkv = torch.randn((n, (heads + 2 * kv_heads) * size), dtype=dtype, device=device, generator=generator) * 3
    weights = torch.randn((2, size), dtype=dtype, device=device, generator=generator)
    expected, before = qkv.clone(), qkv.clone()
    reference.norm_heads(expected, *weights, kv_heads, EPS)
    norm_heads(qkv, *weights, kv_heads, EPS)
    close(qkv, expected)
    values = kv_heads * size
    assert torch.equal(qkv[:, -values:], before[:, -values:]), "the values stay as they are"


@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 2048), (2, 2049), (4, 100), (0, 8)])
def test_silu_and_multiply(dtype, device, generator, n, size):
    gate_up = torch.randn((n, 2 * size), dtype=dtype, device=device, generator=generator) * 4
    close(silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy; it is meant to
def test_silu_of_large_values_stays_finite(dtype, device):
    gate_up = torch.tensor([[-1024.0, 1024.0, 3.0, 2.0]], dtype=dtype, device=device)
    assert silu_and_multiply(gate_up).tolist() == [[0, 2048]]


@pytest.fixture
def fp8_equal(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> Callable[[Fp8Rows, Fp8Rows], None]:
    """Compares bit for bit; the interpreter's cast to e4m3 loses carries, so there torch does that last cast.

    Of float32 on a GPU the row's sum of squares may differ by a last bit for each of its terms.
    """

    if device.type == "cpu":
        monkeypatch.setattr("tessera.kernels.fp8_rows.ROWS_DTYPE", torch.float32)

    def equal(actual: Fp8Rows, expected: Fp8Rows) -> None:
        if device.type == "cuda" and dtype == torch.float32 and len(actual.values):
            rtol = actual.values.shape[1] * FLOAT32
            torch.testing.assert_close(actual.scales, expected.scales, rtol=rtol, atol=0)
            same_but_for_ties(actual.values.float(), expected.values.float())
            return
        assert torch.equal(actual.scales, expected.scales)
        assert torch.equal(actual.values.to(E4M3).view(torch.uint8), expected.values.to(E4M3).view(torch.uint8))

    return equal


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 3584), (5, 100), (0, 16)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm_quantizes_what_it_would_have_returned(fp8_equal, dtype, device, generator, n, size, has_residual):
    x, residual = torch.randn((2, n, size), dtype=dtype, device=device, generator=generator) * 3
    weight = torch.randn(size, dtype=dtype, device=device, generator=generator)
    given, again = (residual, residual.clone()) if has_residual else (None, None)
    plain, expected_sum = add_rms_norm(x, given, weight, EPS)
    rows, total = add_rms_norm(x, again, weight, EPS, fp8=True)
    assert torch.equal(total, expected_sum)
    fp8_equal(rows, quantize_rows(plain))


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 2049), (2, 18944), (0, 16)])
def test_silu_and_multiply_quantizes_what_it_would_have_returned(fp8_equal, dtype, device, generator, n, size):
    gate_up = torch.randn((n, 2 * size), dtype=dtype, device=device, generator=generator) * 4
    gate_up[:1] = 0
    fp8_equal(silu_and_multiply(gate_up, fp8=True), quantize_rows(silu_and_multiply(gate_up)))


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 2049), (6, 100), (0, 16)])
def test_silu_and_multiply_takes_sums_without_their_scales(fp8_equal, dtype, device, generator, n, size):
    sums = torch.randn((n, 2 * size), dtype=dtype, device=device, generator=generator) * 100
    x_scales = torch.rand((n, 1), device=device, generator=generator) / 10
    scales = torch.rand(2 * size, device=device, generator=generator)
    rescaled = (sums.float() * (x_scales * scales)).to(dtype)
    fp8_equal(silu_and_multiply(sums, True, (x_scales, scales)), silu_and_multiply(rescaled, True))
    twin = reference.silu_and_multiply(sums.clone(), True, (x_scales, scales))
    fp8_equal(twin, reference.silu_and_multiply(rescaled, True))
    assert torch.equal(silu_and_multiply(sums, False, (x_scales, scales)), silu_and_multiply(rescaled))


def unfinished(kind, dtype, device, generator, m, n):
    """An unfinished product twice, for who overwrites it, and the product."""
    bias = torch.randn(n, dtype=dtype, device=device, generator=generator) if "bias" in kind else None
    if "parts" in kind:
        parts = torch.randn((3, m, n), device=device, generator=generator)
        total = parts[0] + parts[1] + parts[2]
        product = (total if bias is None else total + bias.float()).to(dtype)
        return [Partials(parts, bias, dtype)] * 2, product
    sums = (torch.randn((m, n), device=device, generator=generator) * 100).to(dtype)
    x_scales = torch.rand((m, 1), device=device, generator=generator) / 10
    scales = torch.rand(n, device=device, generator=generator)
    total = sums.float() * (x_scales * scales)
    product = (total if bias is None else total + bias.float()).to(dtype)
    return [Fp8Sums(sums.clone(), x_scales, scales, bias) for _ in range(2)], product


UNFINISHED = pytest.mark.parametrize("kind", ["sums", "sums and bias", "parts", "parts and bias"])


@UNFINISHED
def test_an_unfinished_product_finishes_itself(dtype, device, generator, kind):
    (given, _), product = unfinished(kind, dtype, device, generator, 3, 100)
    assert given.rows == 3
    close(given.product(), product)


@UNFINISHED
@pytest.mark.parametrize("fp8", [True, False])
def test_add_rms_norm_finishes_a_product(fp8_equal, dtype, device, generator, fp8, kind):
    given, product = unfinished(kind, dtype, device, generator, 3, 100)
    residual = torch.randn((3, 100), dtype=dtype, device=device, generator=generator)
    weight = torch.rand(100, dtype=dtype, device=device, generator=generator)
    for kernel, each in zip((add_rms_norm, reference.add_rms_norm), given):
        expected, expected_total = kernel(product, residual.clone(), weight, EPS, fp8)
        actual, total = kernel(each, residual.clone(), weight, EPS, fp8)
        fp8_equal(actual, expected) if fp8 else close(actual, expected)
        close(total, expected_total)
    with pytest.raises(ValueError, match="without a residual"):
        add_rms_norm(given[0], None, weight, EPS, fp8)


def rows(dtype, device, generator, n, heads, kv_heads, size):
    """qkv and the angles of n tokens."""
    qkv = torch.randn((n, (heads + 2 * kv_heads) * size), dtype=dtype, device=device, generator=generator)
    angles = torch.rand((n, size // 2), device=device, generator=generator) * 6
    return qkv, angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "size"), [(1, 28, 4, 128), (5, 3, 1, 16), (4, 2, 2, 80), (3, 7, 3, 64)]
)
def test_rotate_and_store(dtype, device, generator, n, heads, kv_heads, size):
    qkv, cos, sin = rows(dtype, device, generator, n, heads, kv_heads, size)
    blocks, block_size = 3, 4
    slots = torch.randperm(blocks * block_size, device=device, generator=generator)[:n]
    slots[1::3] = -1
    before = torch.full((2, blocks, block_size, kv_heads, size), 7.0, dtype=dtype, device=device)
    cache, twin = PagedCache(*before.clone()), PagedCache(*before.clone())
    expected = reference.rotate_and_store(qkv.clone(), cos, sin, slots, twin, heads)
    close(rotate_and_store(qkv, cos, sin, slots, cache, heads), expected)
    close(cache.keys, twin.keys)
    assert torch.equal(cache.values, twin.values)


@UNFINISHED
@pytest.mark.parametrize(("n", "heads", "kv_heads", "size"), [(1, 28, 4, 128), (4, 2, 2, 80), (3, 7, 3, 64)])
def test_rotate_and_store_finishes_a_product(dtype, device, generator, n, heads, kv_heads, size, kind):
    qkv, cos, sin = rows(dtype, device, generator, n, heads, kv_heads, size)
    given, product = unfinished(kind, dtype, device, generator, *qkv.shape)
    slots = torch.tensor([5, -1, 0, 11], device=device)[:n]
    twins = torch.zeros((2, 3, 4, kv_heads, size), dtype=dtype, device=device)
    expected = reference.rotate_and_store(product, cos, sin, slots, PagedCache(*twins), heads)
    for kernel, each in zip((reference.rotate_and_store, rotate_and_store), given):
        caches = torch.zeros_like(twins)
        close(kernel(each, cos, sin, slots, PagedCache(*caches), heads), expected)
        close(caches, twins)


@pytest.mark.parametrize(("n", "heads", "kv_heads", "size"), [(5, 14, 2, 128), (4, 2, 2, 80), (3, 7, 3, 64)])
def test_rotate_and_store_in_fp8(dtype, device, generator, n, heads, kv_heads, size):
    """The interpreter's cast to e4m3 loses carries: there the kernel stores float32, and torch does the cast."""
    qkv, cos, sin = rows(dtype, device, generator, n, heads, kv_heads, size)
    qkv *= torch.logspace(-2, 2, n, device=device).to(dtype)[:, None]
    slots = torch.tensor([5, -1, 0, 11, 7], device=device)[:n]
    stored = torch.float32 if device.type == "cpu" else torch.float8_e4m3fn
    caches = [torch.zeros((3, 4, kv_heads, size), dtype=stored, device=device) for _ in range(2)]
    twins = [torch.zeros((3, 4, kv_heads, size), dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    scales, expected_scales = torch.full((2, 2, 3, 4, kv_heads), 7.0, device=device)
    expected = qkv.clone()
    reference.rotate_and_store(expected, cos, sin, slots, PagedCache(*twins, *expected_scales), heads)
    close(rotate_and_store(qkv, cos, sin, slots, PagedCache(*caches, *scales), heads), expected)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(scales, expected_scales, rtol=(4 if scales.is_cuda else 2) * step, atol=0)
    assert torch.equal(scales[1], expected_scales[1])
    for cache, twin in zip(caches, twins):
        same_but_for_ties(cache.to(torch.float8_e4m3fn).float(), twin.float())


ONES = torch.ones
ANGLES, SLOTS = torch.zeros((2, 4)), torch.zeros(2, dtype=torch.int64)
CACHE = PagedCache(*torch.zeros((2, 1, 4, 1, 8)))


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (add_rms_norm, (ONES(2, 8193), None, ONES(8193), EPS), "at most 8192"),
        (add_rms_norm, (ONES(16, 2).T, None, ONES(2), EPS), "contiguous"),
        (add_rms_norm, (ONES(2, 16), ONES(16, 2).T, ONES(16), EPS), "contiguous"),
        (norm_heads, (ONES(2, 40), ONES(16), ONES(16), 1, EPS), "no heads of 16"),
        (norm_heads, (ONES(2, 32), ONES(16), ONES(16), 1, EPS), "no heads of 16"),
        (norm_heads, (ONES(64, 2).T, ONES(16), ONES(16), 1, EPS), "contiguous"),
        (norm_heads, (ONES(2, 64), ONES(16), ONES(8), 1, EPS), "weights of d"),
        (norm_heads, (ONES(2, 64), ONES(16), ONES(16).half(), 1, EPS), "one dtype"),
        (silu_and_multiply, (ONES(4, 2).T,), "contiguous"),
        (silu_and_multiply, (ONES(1, 2 * 32769), True), "at most 32768"),
        (rotate_and_store, (ONES(2, 40), ANGLES, ANGLES, SLOTS, CACHE, 2), "40 values"),
        (rotate_and_store, (ONES(32, 2).T, ANGLES, ANGLES, SLOTS, CACHE, 2), "contiguous"),
    ],
)
def test_refusals(kernel, given, message):
    with pytest.raises(ValueError, match=message):
        kernel(*given)
