"""Which implementation the layers use: the triton kernels on a GPU, their twins in torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

AddRmsNorm = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor, float], "tuple[torch.Tensor, torch.Tensor]"]


@dataclass(frozen=True)
class LayerKernels:
    """The functions of :mod:`tessera.engine.kernels.reference`, or faster ones."""

    add_rms_norm: AddRmsNorm
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]
    skinny_linear: Callable[..., torch.Tensor]
    skinny_gate_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def layer_kernels(device_type: str) -> LayerKernels:
    """The kernels for "cuda" or any other type of device; imports triton for the former alone."""
    if device_type != "cuda":
        from tessera.engine.kernels import reference

        return LayerKernels(
            reference.add_rms_norm, reference.silu_and_multiply, reference.skinny_linear, reference.skinny_gate_up
        )
    from tessera.engine.kernels.add_rms_norm import add_rms_norm
    from tessera.engine.kernels.silu_multiply import silu_and_multiply
    from tessera.engine.kernels.skinny_linear import skinny_gate_up, skinny_linear

    return LayerKernels(add_rms_norm, silu_and_multiply, skinny_linear, skinny_gate_up)
