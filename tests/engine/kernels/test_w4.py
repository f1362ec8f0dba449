"""4-bit weights: their layout, and the products against their twins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tessera.engine.kernels import reference
from tessera.engine.kernels.w4_layout import E4M3_CHUNK, chunk_of, pack, unpack
from tessera.fp8.rows import E4M3, Fp8Rows, quantize_rows

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.engine.kernels.w4_operands import SMALLEST, _bytes_assembly
from tessera.engine.kernels.w4_product import W4Plan
from tessera.engine.kernels.w4a8 import plan_w4a8, w4a8_gate_up, w4a8_linear
from tessera.engine.kernels.w4a16 import plan_w4a16, w4a16_gate_up, w4a16_linear
from tessera.engine.kernels.widen_w4 import widen_w4

LAYOUTS = [
    (256, 128),
    (512, 128),
    (384, 128),
    (128, 32),
    (256, 64),
    (256, 256),
    (192, 192),
    (512, 512),
    (192, 16),
]  # k, group


def canonical(generator, n, k, group, symmetric=False):
    """codes, scales, zeros of a weight whose products with normal rows are about 1."""
    device = generator.device
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand((n, k // group), device=device, generator=generator).half().float() / (4 * k**0.5)
    zeros = torch.randint(0, 17, (n, k // group), device=device, generator=generator).float()
    return codes, scales.half().float(), torch.full_like(zeros, 8) if symmetric else zeros


def dequantized(codes, scales, zeros):
    group = codes.shape[1] // scales.shape[1]
    return (codes.float() - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


@pytest.mark.parametrize(("k", "group"), LAYOUTS)
@pytest.mark.parametrize("n", [1, 40])
def test_the_layout_keeps_every_weight_exactly(generator, k, group, n):
    weight = canonical(generator, n, k, group)
    packed = pack(*weight)
    assert packed.shape == (n, k)
    assert packed.group == group
    assert torch.equal(unpack(packed), dequantized(*weight))


def test_the_layout_takes_4_bits_a_weight_and_a_word_a_group(generator):
    packed = pack(*canonical(generator, 8, 512, 128))
    assert packed.codes.nbytes == 8 * 512 // 2
    assert packed.words.nbytes == 8 * 4 * 4


@pytest.mark.parametrize(
    ("k", "group", "chunk"),
    [
        (3584, 128, 64),
        (18944, 128, 64),
        (896, 128, 32),
        (896, 64, 32),
        (896, 32, 32),
        (896, 896, 32),
        (3584, 3584, 64),
        (192, 64, 16),
        (100, 100, None),
        (256, 8, None),
    ],
)
def test_chunks(k, group, chunk):
    assert chunk_of(k, group) == chunk


def test_the_layout_refuses_what_it_cannot_hold(generator):
    codes, scales, zeros = canonical(generator, 4, 256, 128)
    for bad in (zeros + 0.5, zeros - 17, zeros + 32):
        with pytest.raises(ValueError, match=r"integers of 0 \.\. 31"):
            pack(codes, scales, bad)
    with pytest.raises(ValueError, match=r"\[4, 100\]"):
        pack(codes[:, :100], scales, zeros)
    with pytest.raises(ValueError, match=r"\[4, 1\]"):
        pack(codes, scales, zeros[:, :1])


def test_bytes_of_codes_are_numbers_in_e4m3():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(codes.view(E4M3).float(), codes * SMALLEST.value)


@pytest.mark.parametrize("chunk", range(4))
def test_the_assembly_makes_bytes_of_every_word(chunk):
    """Its instructions, followed for each word of four codes: byte permutation, shift and mask."""
    steps = r"prmt.b32 t, \$1, \$2, 0x(\d{4}); (shr.u32 t, t, 4;)? and.b32 \$0, t, 0x0F0F0F0F;"
    selector, shift = re.search(steps, _bytes_assembly(chunk)).groups()
    words = torch.arange(1 << 16, dtype=torch.int32).view(-1, 4)
    registers = words.to(torch.int16).view(torch.uint8)  # eight bytes in $1 and $2
    found = registers[:, [int(place) for place in reversed(selector)]] >> (4 if shift else 0) & 15
    assert torch.equal(found, words >> 4 * chunk & 15)


class Product:
    """One of the kernels beside its twin, of which x comes in its dtype or from it in e4m3."""

    def __init__(self, name, half, generator):
        self.name, self.half, self.generator = name, half, generator

    def rows(self, m, k):
        x = rows(self.half, self.generator, m, k)
        return quantize_rows(x) if self.name == "w4a8" else x

    def bias(self, n):
        return rows(self.half, self.generator, 1, n)[0]

    def run(self, x, weights, bias=None, plan=None, gated=False):
        kernel = {"w4a8": (w4a8_linear, w4a8_gate_up), "w4a16": (w4a16_linear, w4a16_gate_up)}[self.name][gated]
        return kernel(x, weights, *self._ending(bias), plan=plan)

    def check(self, x, weights, bias=None, plan=None, gated=False):
        twin = getattr(reference, f"{self.name}_{'gate_up' if gated else 'linear'}")
        actual, expected = self.run(x, weights, bias, plan, gated), twin(x, weights, *self._ending(bias))
        assert actual.dtype == expected.dtype == self.half
        # Two last places; in e4m3 the tensor cores add up in 14 bits.
        step = max(2 * torch.finfo(self.half).eps, 5e-3 if self.name == "w4a8" else 0)
        torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=step)

    def _ending(self, bias):
        return (bias, self.half) if self.name == "w4a8" else (bias,)


@pytest.fixture(params=["w4a16", "w4a8"])
def product(request, half, generator):
    return Product(request.param, half, generator)


def rows(half, generator, m, k):
    return torch.randn((m, k), dtype=half, device=generator.device, generator=generator)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter: without a GPU it is only compiled")
class TestProducts:
    @pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 33, 64])
    @pytest.mark.parametrize("has_bias", [True, False])
    def test_linear(self, product, generator, m, has_bias):
        weights = pack(*canonical(generator, 96, 512, 128))
        product.check(product.rows(m, 512), weights, product.bias(96) if has_bias else None)

    @pytest.mark.parametrize(("k", "group"), LAYOUTS)
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_every_layout(self, product, generator, k, group, symmetric):
        weights = pack(*canonical(generator, 70, k, group, symmetric))
        if product.name == "w4a8" and weights.codes.shape[2] < E4M3_CHUNK:
            pytest.skip("w4a8 takes chunks of 32 or more")
        product.check(product.rows(3, k), weights)

    @pytest.mark.parametrize("programs", [1, 2, 3, 4, 5, 7, 10, 15])
    @pytest.mark.parametrize(("block_n", "n"), [(64, 130), (64, 192), (128, 300)])
    def test_shared_tiles_and_odd_columns(self, product, generator, programs, block_n, n):
        # Three tiles of five blocks of k: programs of several tiles, and tiles of several programs.
        weights = pack(*canonical(generator, n, 640, 32))
        x, bias, plan = product.rows(3, 640), product.bias(n), W4Plan(block_n, programs, stages=2)
        for _ in range(2):  # the first leaves the counters as it found them
            product.check(x, weights, bias, plan)
            assert not weights.arrivals.any()

    @pytest.mark.parametrize("programs", [1, 4])
    def test_the_same_bits_again(self, product, generator, programs):
        weights = pack(*canonical(generator, 64, 1024, 128))
        x = product.rows(13, 1024)
        first, *others = [product.run(x, weights, plan=W4Plan(64, programs)) for _ in range(4)]
        assert all(torch.equal(first, other) for other in others)

    def test_a_row_does_not_depend_on_its_neighbours(self, product, generator):
        weights = pack(*canonical(generator, 64, 512, 128))
        x, plan = product.rows(16, 512), W4Plan(64, 2)
        whole = product.run(x, weights, plan=plan)
        parts = x if isinstance(x, Fp8Rows) else (x,)
        for part in parts:
            part[1:] = float("nan")
        assert torch.equal(product.run(x, weights, plan=plan)[0], whole[0])
        one = Fp8Rows(*(part[:1] for part in x)) if isinstance(x, Fp8Rows) else x[:1]
        assert torch.equal(product.run(one, weights, plan=plan)[0], whole[0])

    @pytest.mark.parametrize("m", [1, 16, 20, 64])
    @pytest.mark.parametrize("size", [16, 50, 101])
    @pytest.mark.parametrize("programs", [1, 3])
    def test_gate_up(self, product, generator, m, size, programs):
        weights = pack(*canonical(generator, 2 * size, 512, 32))
        plan = W4Plan(64, programs, stages=2)
        product.check(product.rows(m, 512), weights, product.bias(2 * size), plan, gated=True)

    @pytest.mark.parametrize(("block_n", "warps"), [(128, 4), (128, 8), (256, 8)])
    def test_wide_tiles(self, product, generator, block_n, warps):
        weights = pack(*canonical(generator, 300, 1024, 128))
        for programs in (2, 5):
            product.check(product.rows(40, 1024), weights, None, W4Plan(block_n, programs, warps, stages=2))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("k", "group"), LAYOUTS)
def test_widened(half, generator, k, group):
    weights = pack(*canonical(generator, 70, k, group))
    assert torch.equal(widen_w4(weights, half), reference.widen_w4(weights, half))


def test_refuses_operands(generator):
    weights = pack(*canonical(generator, 8, 256, 128))
    device = generator.device
    for x, message in (
        (torch.ones(65, 256).half(), r"\[65, 256\]"),
        (torch.ones(0, 256).half(), r"\[0, 256\]"),
        (torch.ones(2, 128).half(), r"\[2, 128\]"),
        (torch.ones(2, 256), "bfloat16 or float16"),
        (torch.ones(256, 2).half().T, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            w4a16_linear(x.to(device), weights)
    for plan in (W4Plan(64, 2), W4Plan(32, 1)):
        with pytest.raises(ValueError, match="1 tiles of 1 blocks"):
            w4a16_linear(torch.ones(2, 256, device=device).half(), weights, plan=plan)


def test_w4a8_refuses_operands(generator):
    weights = pack(*canonical(generator, 8, 256, 128))
    narrow = pack(*canonical(generator, 8, 192, 16))
    device = generator.device
    for shape, dtype, given, message in (
        ((65, 256), E4M3, weights, r"\[65, 256\]"),
        ((0, 256), E4M3, weights, r"\[0, 256\]"),
        ((2, 128), E4M3, weights, r"\[2, 128\]"),
        ((2, 192), E4M3, narrow, "chunks of 16"),
        ((2, 256), torch.bfloat16, weights, "float8_e4m3fn"),
    ):
        x = Fp8Rows(torch.ones(shape, device=device).to(dtype), torch.ones((shape[0], 1), device=device))
        with pytest.raises(ValueError, match=message):
            w4a8_linear(x, given, None, torch.bfloat16)


def test_compiles_for_hopper():
    """On any machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("compile_w4.py"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("n", "blocks"), [(4608, 14), (3584, 14), (37888, 14), (3584, 74), (8, 1), (100, 3)])
@pytest.mark.parametrize("sms", [1, 60, 132])
def test_plans_are_possible(m, n, blocks, sms):
    for plan_of in (plan_w4a8, plan_w4a16):
        plan = plan_of(m, n, blocks, sms)
        assert 1 <= plan.programs <= -(-n // plan.block_n) * blocks
