"""The candidate kernel against the product and the activation behind it, and that it compiles for Hopper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="it is written in triton, which is not installed")

import bench_joules
import gate_up_epilogue
from energy import Repeater
from gate_up_epilogue import Plan, gate_up_silu, interleaved
from gpu_power import GpuPower

from tessera.engine.kernels import reference

SMALL = [Plan(32, 16, 32, group=2), Plan(32, 16, 32, group=2, interleaved=True)]


@pytest.mark.parametrize("plan", SMALL, ids=str)
def test_it_is_the_product_and_the_activation(plan):
    torch.manual_seed(3)
    x, weight = torch.randn(75, 96).half(), (torch.randn(2 * 56, 96) * 0.2).half()
    expected = reference.silu_and_multiply(F.linear(x, weight))
    actual = gate_up_silu(x, interleaved(weight) if plan.interleaved else weight, plan)
    torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


def test_plans_are_compared_with_the_library(monkeypatch, capsys):
    monkeypatch.setattr(gate_up_epilogue, "PLANS", SMALL)
    with GpuPower([]) as power:
        repeater = Repeater(power, torch.device("cpu"), 0.0, 0.0)
        gate_up_epilogue.compare(32, 64, [40], repeater, bench_joules.Report("trial.joules", ""))
    printed = capsys.readouterr().out
    assert "cuBLAS, silu_and_multiply" in printed and "WRONG" not in printed
    assert all(printed.count(str(plan)) == 2 for plan in SMALL)


def test_a_plan_that_errs_or_is_refused_is_none(monkeypatch, capsys):
    monkeypatch.setattr(gate_up_epilogue, "PLANS", [*SMALL, Plan(3, 16, 32)])
    x, weight = torch.randn(8, 32).half(), torch.randn(32, 32).half()
    right = reference.silu_and_multiply(F.linear(x, weight))
    assert list(gate_up_epilogue.candidates([x], [weight], right)) == SMALL
    assert not gate_up_epilogue.candidates([x], [weight], 2 * right)
    printed = capsys.readouterr().out
    assert printed.count("refused") == 2 and printed.count("WRONG") == 2


def test_it_compiles_for_hopper():
    script = Path(__file__).with_name("compile_gate_up.py")
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
