"""The layers' triton kernels under the names of their twins in :mod:`tessera.engine.kernels.reference`."""

from __future__ import annotations

from tessera.engine.kernels.add_rms_norm import add_rms_norm
from tessera.engine.kernels.gate_up_silu import gate_up_silu
from tessera.engine.kernels.norm_heads import norm_heads
from tessera.engine.kernels.rotate_and_store import rotate_and_store
from tessera.engine.kernels.silu_multiply import silu_and_multiply
from tessera.engine.kernels.skinny_fp8 import skinny_fp8
from tessera.engine.kernels.skinny_linear import skinny_gate_up, skinny_unfinished
from tessera.engine.kernels.w4a16 import w4a16_gate_up, w4a16_linear
from tessera.engine.kernels.widen_w4 import widen_w4

__all__ = [
    "add_rms_norm",
    "gate_up_silu",
    "norm_heads",
    "rotate_and_store",
    "silu_and_multiply",
    "skinny_fp8",
    "skinny_gate_up",
    "skinny_unfinished",
    "w4a16_gate_up",
    "w4a16_linear",
    "widen_w4",
]
