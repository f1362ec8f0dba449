"""4-bit weights: their layout, and the products against their twins."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.w4_layout import chunk_of, pack, unpack

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.kernels.w4a16 import W4Plan, plan_fixed, plan_w4a16, w4a16_gate_up, w4a16_linear, widen_w4

#: k and group: chunks of 64, 32 and 16 columns, groups of one, of two, of a block and of more
LAYOUTS = [(512, 128), (384, 128), (128, 32), (256, 64), (256, 256), (192, 192), (192, 16)]


def canonical(generator, n, k, group):
    """codes, scales, zeros of a weight whose products with normal rows are about 1."""
    device = generator.device
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand((n, k // group), device=device, generator=generator).half().float() / (4 * k**0.5)
    zeros = torch.randint(0, 17, (n, k // group), device=device, generator=generator).float()
    return codes, scales.half().float(), zeros


def dequantized(codes, scales, zeros):
    group = codes.shape[1] // scales.shape[1]
    return (codes.float() - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("k", "group"), LAYOUTS)
@pytest.mark.parametrize("n", [1, 70])
def test_the_layout_keeps_every_weight_exactly(half, generator, k, group, n):
    weight = canonical(generator, n, k, group)
    packed = pack(*weight)
    assert (packed.shape, packed.group) == ((n, k), group)
    assert (packed.codes.nbytes, packed.words.nbytes) == (n * k // 2, n * k // group * 4)
    assert torch.equal(unpack(packed), dequantized(*weight))
    assert torch.equal(widen_w4(packed, half), dequantized(*weight).to(half))


def test_chunks():
    held = {(18944, 128): 64, (896, 128): 32, (896, 896): 32, (3584, 3584): 64, (192, 64): 16, (100, 100): None}
    assert {shape: chunk_of(*shape) for shape in held} == held
    assert chunk_of(256, 8) is None


def test_the_layout_refuses_what_it_cannot_hold(generator):
    codes, scales, zeros = canonical(generator, 4, 256, 128)
    for bad in (zeros + 0.5, zeros - 17, zeros + 32):
        with pytest.raises(ValueError, match=r"integers of 0 \.\. 31"):
            pack(codes, scales, bad)
    with pytest.raises(ValueError, match=r"\[4, 100\]"):
        pack(codes[:, :100], scales, zeros)
    with pytest.raises(ValueError, match=r"\[4, 1\]"):
        pack(codes, scales, zeros[:, :1])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2 * step, atol=2 * step)


def rows(half, generator, m, k):
    return torch.randn((m, k), dtype=half, device=generator.device, generator=generator)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Gluon has no interpreter: without a GPU it is only compiled")
class TestProducts:
    @pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 33, 64])
    @pytest.mark.parametrize("has_bias", [True, False])
    def test_linear(self, half, generator, m, has_bias):
        weights = pack(*canonical(generator, 96, 512, 128))
        x, bias = rows(half, generator, m, 512), rows(half, generator, 1, 96)[0] if has_bias else None
        close(w4a16_linear(x, weights, bias), reference.w4a16_linear(x, weights, bias))

    @pytest.mark.parametrize(("k", "group"), LAYOUTS)
    def test_every_layout(self, half, generator, k, group):
        weights = pack(*canonical(generator, 70, k, group))
        x = rows(half, generator, 3, k)
        close(w4a16_linear(x, weights), reference.w4a16_linear(x, weights))

    @pytest.mark.parametrize("programs", [1, 2, 3, 4, 5, 7, 10, 15])
    @pytest.mark.parametrize(("block_n", "n", "warps"), [(64, 130, 4), (64, 192, 4), (128, 300, 4), (128, 300, 8)])
    def test_shared_tiles_and_odd_columns(self, half, generator, programs, block_n, n, warps):
        # Three tiles of five blocks of k: programs of several tiles, and tiles of several programs.
        weights = pack(*canonical(generator, n, 320, 16))
        x, bias = rows(half, generator, 3, 320), rows(half, generator, 1, n)[0]
        plan = W4Plan(block_n, programs, warps, stages=2)
        expected = w4a16_linear(x, weights, bias, plan)
        close(expected, reference.w4a16_linear(x, weights, bias))
        for _ in range(4):  # each leaves the counters as it found them, whichever arrives last
            assert not weights.arrivals.any()
            assert torch.equal(w4a16_linear(x, weights, bias, plan), expected)

    def test_a_row_does_not_depend_on_its_neighbours(self, half, generator):
        weights = pack(*canonical(generator, 64, 512, 128))
        x, plan = rows(half, generator, 16, 512), W4Plan(64, 2)
        whole = w4a16_linear(x, weights, plan=plan)
        x[1:] = float("nan")
        assert torch.equal(w4a16_linear(x, weights, plan=plan)[0], whole[0])
        assert torch.equal(w4a16_linear(x[:1], weights, plan=plan)[0], whole[0])

    @pytest.mark.parametrize("m", [1, 16, 20, 64])
    @pytest.mark.parametrize("size", [16, 50, 101])
    @pytest.mark.parametrize("programs", [1, 3])
    def test_gate_up(self, half, generator, m, size, programs):
        weights = pack(*canonical(generator, 2 * size, 512, 32))
        x, bias = rows(half, generator, m, 512), rows(half, generator, 1, 2 * size)[0]
        plan = W4Plan(64, programs, stages=2)
        close(w4a16_gate_up(x, weights, bias, plan), reference.w4a16_gate_up(x, weights, bias))


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


def test_compiles_for_hopper():
    """On any machine; the fused gate-up product too."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("compile_for_hopper.py"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("sms", [1, 60, 132])
def test_plans_are_possible(sms):
    shapes = ((4608, 14), (3584, 14), (37888, 14), (3584, 74), (8, 1), (100, 3))
    for m, (n, blocks) in product((1, 8, 9, 16, 17, 32, 33, 64), shapes):
        plan = plan_w4a16(m, n, blocks, sms)
        assert 1 <= plan.programs <= -(-n // plan.block_n) * blocks


@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (3584, 18944), (37888, 3584), (64, 256)])
def test_a_fixed_plan_cuts_the_work_alike_for_any_number_of_rows(n, k):
    plans = [plan_fixed(m, n, k // 256, 132) for m in range(1, 65)]
    assert len({(plan.block_n, plan.programs) for plan in plans}) == 1
    assert all(plan.programs <= -(-n // plan.block_n) * (k // 256) for plan in plans)
