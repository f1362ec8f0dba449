"""The layers' triton kernels under the names of their twins in :mod:`tessera.kernels.reference`."""

# ruff: noqa: F401
from __future__ import annotations

from tessera.kernels.activation import silu_and_multiply
from tessera.kernels.early_linear import early_gate_up, early_linear
from tessera.kernels.experts import grouped_down, grouped_gate_up, route
from tessera.kernels.gate_up_silu import gate_up_silu
from tessera.kernels.likeliest import likeliest
from tessera.kernels.norm import add_and_norm, add_rms_norm
from tessera.kernels.penalties import append_tokens, penalized
from tessera.kernels.rotary import apply_rotary, rotate_and_store
from tessera.kernels.row_linear import row_linear, row_product
from tessera.kernels.skinny_linear import skinny_deferred, skinny_fp8, skinny_gate_up
from tessera.kernels.w4a16 import w4a16_gate_up, w4a16_linear, widen_w4
