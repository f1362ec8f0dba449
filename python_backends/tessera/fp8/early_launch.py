"""Kernels launched before the one in front of them has ended: programmatic dependent launch, on Hopper.

A launch costs a short kernel about as much as its work. One that is launched early has its programs in place when the
kernel in front ends, and waits for it by itself: before it reads what that one wrote, and before it writes anything.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel with a parameter EARLY, which waits for the one in front of it where the device can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Lets the next kernel be launched, then waits until all before this one have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
