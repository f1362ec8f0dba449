"""The elementwise kernels against their twins."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tessera.kernels import reference

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels import fp8
from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.fp8_rows import E4M3, Fp8Rows, Fp8Sums, empty_rows, quantize_rows
from tessera.kernels.likeliest import likeliest
from tessera.kernels.norm import add_rms_norm
from tessera.kernels.operands import Allowed, HeadNorms, PagedCache, Partials
from tessera.kernels.rotary import rotate_and_store

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-6
FLOAT32 = torch.finfo(torch.float32).eps


def close(actual: torch.Tensor, expected: torch.Tensor, rounding: float = FLOAT32) -> None:
    """Two roundings in the tensors' own dtype apart at most; the sums' order is the kernel's own.

    A GPU fuses a product with the sum that it goes into. Where two terms cancel, that last bit is the terms', not the
    sum's: as large as that of the largest value, twice; or as ``rounding``, where terms were rounded before.
    """
    step = torch.finfo(actual.dtype).eps
    terms = 2 * rounding * expected.abs().amax().item() if actual.is_cuda and actual.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=max(2 * step, 2e-6), atol=max(2e-6, terms))


def same_but_for_ties(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Numbers of e4m3, as float32: what lay between two of them may come to either where a bit before was another."""
    torch.testing.assert_close(actual, expected, rtol=2**-3, atol=2**-9)
    assert (actual == expected).float().mean() > 0.98


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
            torch.testing.assert_close(actual.scales.cpu(), expected.scales.cpu(), rtol=rtol, atol=0)
            same_but_for_ties(actual.values.float().cpu(), expected.values.float().cpu())
            return
        assert torch.equal(actual.scales.cpu(), expected.scales.cpu())
        assert torch.equal(*(rows.values.to(E4M3).view(torch.uint8).cpu() for rows in (actual, expected)))

    return equal


def products(kind, dtype, device, generator, m, n):
    """A product three times, for who overwrites it, and itself; of all kinds but the plain ones it is deferred."""
    normal = partial(torch.randn, device=device, generator=generator)
    if kind in PLAIN:
        product = (3 * normal((m, n))).to(dtype)
        return [product.clone() for _ in range(3)], product
    bias = normal(n).to(dtype) if "bias" in kind else None
    if "parts" in kind:
        parts = normal((3, m, n))
        total, made = parts[0] + parts[1] + parts[2], [Partials(parts, bias, dtype)] * 3
    else:
        sums = (100 * normal((m, n))).to(dtype)
        x_scales, scales = torch.linspace(0.001, 0.1, m, device=device)[:, None], normal(n).abs()
        total = sums.float() * (x_scales * scales)
        made = [Fp8Sums(sums.clone(), x_scales, scales, bias) for _ in range(3)]
    return made, (total if bias is None else total + bias.float()).to(dtype)


PLAIN = ("plain", "no residual")
DEFERRED = ("sums", "sums and bias", "parts", "parts and bias")


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize(("m", "n"), [(1, 16), (3, 1030)])
def test_an_unfinished_product_is_finished(dtype, device, generator, kind, m, n):
    (given, again, _), product = products(kind, dtype, device, generator, m, n)
    assert given.rows == m
    close(given.product(), product)
    close((fp8.add_partials if "parts" in kind else fp8.rescale)(*again), product)


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 3584), (2, 18944), (5, 100), (0, 8)])
@pytest.mark.parametrize("static", [False, True])
def test_quantize_rows(fp8_equal, dtype, device, generator, n, size, static):
    x = torch.randn((n, size), device=device, generator=generator) * torch.linspace(0.01, 30, n, device=device)[:, None]
    x = x.to(dtype)
    x[1:2] = 0
    scale = torch.tensor(0.007) if static else None
    rows = empty_rows(x.shape, device)
    fp8.quantize_rows(x, None if scale is None else scale.to(device), *rows)
    fp8_equal(rows, quantize_rows(x.cpu(), scale))


@pytest.mark.parametrize(
    ("kind", "n", "size"),
    [*((kind, *shape) for kind in PLAIN for shape in ((1, 16), (3, 3584), (2, 8192), (0, 16)))]
    + [(kind, 3, 100) for kind in DEFERRED],
)
def test_add_rms_norm(fp8_equal, dtype, device, generator, kind, n, size):
    """Quantized it is what it would have returned."""
    (given, again, twin), _ = products(kind, dtype, device, generator, n, size)
    residual = torch.randn((n, size), dtype=dtype, device=device, generator=generator)
    weight = torch.randn(size, dtype=dtype, device=device, generator=generator)

    def run(kernel, x, fp8=False):
        held = None if kind == "no residual" else residual.clone()
        normalised, total = kernel(x, held, weight, EPS, fp8)
        assert total is (x if held is None else held)
        return normalised, total

    expected, expected_total = run(reference.add_rms_norm, twin)
    actual, total = run(add_rms_norm, given)
    close(actual, expected)
    close(total, expected_total)
    quantized, total = run(add_rms_norm, again, fp8=True)
    fp8_equal(quantized, quantize_rows(actual))
    close(total, expected_total)


@pytest.mark.parametrize(("n", "size"), [(1, 16), (3, 2049), (0, 16)])
def test_silu_and_multiply(fp8_equal, dtype, device, generator, n, size):
    """Quantized it is what it would have returned, and so it is of sums without their scales."""
    gate_up = torch.randn((n, 2 * size), dtype=dtype, device=device, generator=generator) * 4
    gate_up[:1] = 0
    close(silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up))
    fp8_equal(silu_and_multiply(gate_up, fp8=True), quantize_rows(silu_and_multiply(gate_up)))
    scales = torch.linspace(0.5, 1, n, device=device)[:, None], torch.rand(2 * size, device=device, generator=generator)
    rescaled = (gate_up.float() * (scales[0] * scales[1])).to(dtype)
    for kernel in (silu_and_multiply, reference.silu_and_multiply):
        fp8_equal(kernel(gate_up.clone(), True, scales), kernel(rescaled, True))
        assert torch.equal(kernel(gate_up.clone(), False, scales), kernel(rescaled))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy; it is meant to
def test_silu_of_large_values_stays_finite(dtype, device):
    gate_up = torch.tensor([[-1024.0, 1024.0, 3.0, 2.0]], dtype=dtype, device=device)
    assert silu_and_multiply(gate_up).tolist() == [[0, 2048]]


def angles(device, generator, n, size):
    """Cosines and sines of n tokens."""
    found = torch.rand((n, size // 2), device=device, generator=generator) * 6
    return found.cos(), found.sin()


def head_norms(dtype, device, generator, size):
    return HeadNorms(*torch.randn((2, size), dtype=dtype, device=device, generator=generator), EPS)


@pytest.mark.parametrize("kind", ["plain", *DEFERRED])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n", "heads", "kv_heads", "size"), [(1, 28, 4, 128), (4, 2, 2, 80), (3, 7, 3, 64)])
def test_rotate_and_store(dtype, device, generator, n, heads, kv_heads, size, kind, normed):
    given, product = products(kind, dtype, device, generator, n, (heads + 2 * kv_heads) * size)
    turns, slots = angles(device, generator, n, size), torch.tensor([5, -1, 0, 11], device=device)[:n]
    twins = torch.full((2, 3, 4, kv_heads, size), 7.0, dtype=dtype, device=device)
    before = twins.clone()
    norms = head_norms(dtype, device, generator, size) if normed else None
    rounding = torch.finfo(dtype).eps if normed else FLOAT32
    expected = reference.rotate_and_store(product, *turns, slots, PagedCache(*twins), heads, norms)
    for kernel, each in zip((reference.rotate_and_store, rotate_and_store), given):
        caches = before.clone()
        close(kernel(each, *turns, slots, PagedCache(*caches), heads, norms), expected, rounding)
        close(caches, twins, rounding)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n", "heads", "kv_heads", "size"), [(5, 14, 2, 128), (4, 2, 2, 80), (3, 7, 3, 64)])
def test_rotate_and_store_in_fp8(dtype, device, generator, n, heads, kv_heads, size, normed):
    """The interpreter's cast to e4m3 loses carries: there the kernel stores float32, and torch does the cast."""
    (qkv, *_), _ = products("plain", dtype, device, generator, n, (heads + 2 * kv_heads) * size)
    cos, sin = angles(device, generator, n, size)
    qkv *= torch.logspace(-2, 2, n, device=device).to(dtype)[:, None]
    slots = torch.tensor([5, -1, 0, 11, 7], device=device)[:n]
    stored = torch.float32 if device.type == "cpu" else torch.float8_e4m3fn
    caches = [torch.zeros((3, 4, kv_heads, size), dtype=stored, device=device) for _ in range(2)]
    twins = [torch.zeros((3, 4, kv_heads, size), dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    scales, expected_scales = torch.full((2, 2, 3, 4, kv_heads), 7.0, device=device)
    expected = qkv.clone()
    norms = head_norms(dtype, device, generator, size) if normed else None
    reference.rotate_and_store(expected, cos, sin, slots, PagedCache(*twins, *expected_scales), heads, norms)
    close(rotate_and_store(qkv, cos, sin, slots, PagedCache(*caches, *scales), heads, norms), expected)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(scales, expected_scales, rtol=(4 if scales.is_cuda else 2) * step, atol=0)
    assert torch.equal(scales[1], expected_scales[1])
    for cache, twin in zip(caches, twins):
        same_but_for_ties(cache.to(torch.float8_e4m3fn).float(), twin.float())


@pytest.mark.parametrize("vocabulary", [1, 4096, 9001])
def test_likeliest(dtype, device, generator, vocabulary):
    """Of equal ones the first, whichever part they are in; a row that is not finite has none."""
    logits = torch.randn((9, vocabulary + 3), generator=generator, device=device).to(dtype)[:, :vocabulary]
    logits[1] = -3
    logits[2, [vocabulary // 2, -1]] = 9
    logits[3, -1] = -9e3
    for row, value in enumerate((float("nan"), float("inf"), -float("inf")), 4):
        logits[row, vocabulary // 2] = value
    assert likeliest(logits).tolist() == reference.likeliest(logits).tolist()
    assert likeliest(logits)[[1, 2, 4, 5, 6]].tolist() == [0, vocabulary // 2, -1, -1, -1]
    assert likeliest(logits[:0]).tolist() == []


@pytest.mark.parametrize("vocabulary", [1, 13, 4099, 9001])
def test_likeliest_of_what_is_allowed(dtype, device, generator, vocabulary):
    """Rows with a mask, and with any token; what is not finite counts where it is not allowed too."""
    logits = torch.randn((8, vocabulary), generator=generator, device=device).to(dtype)
    ways = torch.rand((3, vocabulary), generator=generator, device=device) < 0.3
    ways[0], ways[1, -1] = torch.arange(vocabulary, device=device) == vocabulary // 2, True
    logits[5:, vocabulary // 2] = float("nan")
    padded = F.pad(ways, (0, -vocabulary % 8)).view(3, -1, 8).to(torch.uint8)
    bits = (padded << torch.arange(8, dtype=torch.uint8, device=device)).sum(2, dtype=torch.uint8)
    allowed = Allowed(torch.tensor([0, 1, 2, -1, -1, -1, 1, -1], device=device), bits)
    chosen = likeliest(logits, allowed)
    assert chosen.tolist() == reference.likeliest(logits, allowed).tolist()
    masked = [logits[row].masked_fill(~ways[line], float("-inf")).argmax().item() for row, line in enumerate([0, 1, 2])]
    assert chosen.tolist() == [*masked, *logits[3:5].argmax(1).tolist(), -1, -1, -1]


ONES = torch.ones
ANGLES, SLOTS = torch.zeros((2, 4)), torch.zeros(2, dtype=torch.int64)
CACHE = PagedCache(*torch.zeros((2, 1, 4, 1, 8)))


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (add_rms_norm, (ONES(2, 8193), None, ONES(8193), EPS), "at most 8192"),
        (add_rms_norm, (ONES(16, 2).T, None, ONES(2), EPS), "contiguous"),
        (add_rms_norm, (ONES(2, 16), ONES(16, 2).T, ONES(16), EPS), "contiguous"),
        (add_rms_norm, (Partials(ONES(2, 2, 16), None, torch.float32), None, ONES(16), EPS), "without a residual"),
        (silu_and_multiply, (ONES(4, 2).T,), "contiguous"),
        (likeliest, (ONES(16, 2).T,), "contiguous"),
        (silu_and_multiply, (ONES(1, 2 * 32769), True), "at most 32768"),
        (fp8.quantize_rows, (ONES(1, 32769), None, None, None), "at most 32768"),
        (fp8.quantize_rows, (ONES(16, 2).T, None, None, None), "contiguous"),
        (rotate_and_store, (ONES(2, 40), ANGLES, ANGLES, SLOTS, CACHE, 2), "40 values"),
        (rotate_and_store, (ONES(32, 2).T, ANGLES, ANGLES, SLOTS, CACHE, 2), "contiguous"),
        (
            rotate_and_store,
            (ONES(2, 32), ANGLES, ANGLES, SLOTS, CACHE, 2, HeadNorms(ONES(8), ONES(4), EPS)),
            "8 weights",
        ),
        (rotate_and_store, (ONES(2, 32), ANGLES, ANGLES, SLOTS, CACHE, 2, HeadNorms(*ONES(2, 8).half(), EPS)), "8 wei"),
    ],
)
def test_refusals(kernel, given, message):
    with pytest.raises(ValueError, match=message):
        kernel(*given)
