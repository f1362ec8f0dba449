"""Attention for Hopper GPUs without one: the kernel's source with stand-ins for the language, and its machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vision.gluon_fakes import load_without_gpu

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.vision.kernels import hopper_attention as compiled
from tessera.vision.kernels.attention import attend_within
from tessera.vision.kernels.hopper_plans import HOPPER_PLANS, HopperPlan
from tessera.vision.kernels.varlen_attention import query_tiles

CPU = torch.device("cpu")
MIXES = [[4], [16], [32, 32], [100], [4, 40, 1, 33, 64, 4]]
#: numbers of a plan: rows, tokens, warps, stages, groups, turns, registers, programs, held
PLANS = [(32, 16, 4, 2), (32, 16, 4, 3), (32, 16, 4, 4, 2), (32, 16, 4, 2, 2, True), (48, 16, 4, 2, 3)]
PLANS += [(32, 16, 4, 2, 2, True, None, 3), (48, 16, 4, 4, 3, False, None, 2, True)]


@pytest.fixture
def kernel(monkeypatch):
    return load_without_gpu(Path(compiled.__file__), monkeypatch)


def heads_of(patches, size):
    return torch.randn(patches, 3, 2, size, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("numbers", PLANS, ids=str)
@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_pictures_of_any_sizes(kernel, lengths, size, numbers):
    qkv, plan = heads_of(sum(lengths), size), HopperPlan(*numbers)
    tiles = torch.from_numpy(query_tiles(lengths, plan.rows))
    more = torch.cat((tiles, torch.zeros(2, 3, dtype=torch.int32)))
    actual = kernel.hopper_attention(*qkv.unbind(1), more, plan)
    torch.testing.assert_close(actual, attend_within(lengths, CPU)(*qkv.unbind(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numbers", PLANS, ids=str)
@pytest.mark.parametrize("length", [20, 33])
def test_a_neighbours_not_a_numbers_stay_there(kernel, length, numbers):
    lengths, plan = [length, 20, length], HopperPlan(*numbers)
    qkv = heads_of(sum(lengths), 80)
    expected = attend_within(lengths, CPU)(*qkv.unbind(1))
    qkv[length : length + 20] = float("nan")
    actual = kernel.hopper_attention(*qkv.unbind(1), torch.from_numpy(query_tiles(lengths, plan.rows)), plan)
    own = [*range(length), *range(length + 20, sum(lengths))]
    torch.testing.assert_close(actual[own], expected[own], rtol=1e-4, atol=1e-5)
    assert actual[length : length + 20].isnan().all()


@pytest.mark.parametrize("wrong", [{"groups": 4}, {"groups": 3, "turns": True}, {"groups": 1, "programs": 2}], ids=str)
def test_plans_that_the_kernel_does_not_know_are_refused(wrong):
    with pytest.raises(ValueError, match="no plan of hopper_attention"):
        HopperPlan(192, 64, 4, 2, **wrong)


def test_compiles_for_hopper():
    """On any machine: a plan of each number of groups."""
    plans = {plan.groups: str(plan) for plan in reversed(HOPPER_PLANS)}.values()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("compile_hopper_attention.py")), *plans]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
