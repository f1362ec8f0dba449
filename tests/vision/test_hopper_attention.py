"""Attention for Hopper GPUs without one: it compiles, to machine code in the order that it is about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in triton, which is not installed")

from tessera.vision.kernels.hopper_attention import HOPPER_PLANS


def test_compiles_for_hopper():
    """On any machine: a plan of each number of groups."""
    plans = {plan.groups: str(plan) for plan in reversed(HOPPER_PLANS)}.values()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("compile_hopper_attention.py")), *plans]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
