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

from tessera.kernels import hopper_attention as compiled
from tessera.kernels.operands import HopperPlan, query_tiles
from tessera.kernels.tower_attention import attend_within

CPU = torch.device("cpu")
MIXES = [[4], [16], [32, 32], [100], [4, 40, 1, 33, 64, 4]]
PLANS = [HopperPlan(programs, 32, 16, 4, stages) for programs, stages in ((1, 2), (3, 3), (99, 2), (2, 4))]


@pytest.fixture
def kernel(monkeypatch):
    return load_without_gpu(Path(compiled.__file__), monkeypatch)


def heads_of(patches, size):
    return torch.randn(patches, 3, 2, size, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_pictures_of_any_sizes(kernel, lengths, size, plan):
    qkv = heads_of(sum(lengths), size)
    tiles = torch.from_numpy(query_tiles(lengths, plan.rows))
    more = torch.cat((tiles, torch.zeros(2, 3, dtype=torch.int32)))
    actual = kernel.hopper_attention(*qkv.unbind(1), more, plan)
    torch.testing.assert_close(actual, attend_within(lengths, CPU)(*qkv.unbind(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("length", [20, 33])
def test_a_neighbours_not_a_numbers_stay_there(kernel, length, plan):
    lengths = [length, 20, length]
    qkv = heads_of(sum(lengths), 80)
    expected = attend_within(lengths, CPU)(*qkv.unbind(1))
    qkv[length : length + 20] = float("nan")
    actual = kernel.hopper_attention(*qkv.unbind(1), torch.from_numpy(query_tiles(lengths, plan.rows)), plan)
    own = [*range(length), *range(length + 20, sum(lengths))]
    torch.testing.assert_close(actual[own], expected[own], rtol=1e-4, atol=1e-5)
    assert actual[length : length + 20].isnan().all()


def test_compiles_for_hopper():
    """On any machine."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("compile_hopper_attention.py"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
