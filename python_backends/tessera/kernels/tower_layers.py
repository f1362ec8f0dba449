"""The parts of a tower that can be computed in more than one way.

A linear layer of a tower in FP8: e4m3 weights, a scale an output channel; a scale a row of what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tessera.kernels import reference
from tessera.kernels.fp8_rows import E4M3, LARGEST, Fp8Rows, fp8_linear, quantize_rows, quantize_weight
from tessera.kernels.tower_attention import (
    BACKENDS,
    CLASS_APART,
    VarlenAttention,
    attend,
    attend_class_apart,
    attend_in_torch,
    attend_in_triton,
    attend_within,
    triton_configs,
)
from tessera.kernels.tuning import layer_kernels

_tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
}
#: a GPU's ways; "default": torch chooses
ATTENTIONS: dict[str, Callable[..., torch.Tensor | Fp8Rows]] = {
    "default": attend,
    **{name: partial(attend, backend=backend) for name, backend in BACKENDS.items()},
    CLASS_APART: attend_class_apart,
}
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class TowerKernels:
    """Attention, and the layers' kernels (:func:`tessera.kernels.tuning.layer_kernels`). Those of a GPU may write a sum
    into their argument, turned heads into qkv, and an activation into the layer's output.

    ``epilogue``: a GELU is applied by the product before it. ``fp8``: for a tower of Fp8Linear: what is computed in
    front of one gives Fp8Rows, quantized in the same pass.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | Fp8Rows] = attend
    attend_within: VarlenAttention = attend_within
    layers: ModuleType = reference
    epilogue: bool = False
    fp8: bool = False

    def add_and_norm(
        self, x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        return self.layers.add_and_norm(x, update, norm, self.fp8)

    def linear_and_activate(self, x: Any, linear: Any, activation: str) -> torch.Tensor | Fp8Rows:
        """A linear layer, of a tensor or Fp8Rows, and one of ACTIVATIONS.

        On a GPU the exact GELU and quick_gelu overwrite the layer's own output, which saves that much memory. In a
        tower of Fp8Linear every GELU but quick_gelu is computed in its tanh form, but for a projector that the
        checkpoint left as it was.

        An epilogue, cuBLAS's, is the tanh form too. That differs from the exact one by at most 5e-4 (below 16-bit
        rounding around the values that matter), and it takes float32 sums where the exact one takes their 16-bit
        roundings. Not for float32.
        """
        on_gpu, quick = self.layers is not reference, activation == "quick_gelu"
        if on_gpu and self.fp8 and isinstance(linear, Fp8Linear) and (quick or activation in GELUS):
            from tessera.kernels.activation import gelu_rows

            return gelu_rows(linear(x), quick)
        if self.epilogue and activation in GELUS:
            rows = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
            return rows.unflatten(0, x.shape[:-1])
        y = linear(x)
        if on_gpu and quick and linear.out_features % 8 == 0:
            from tessera.kernels.activation import quick_gelu_in_place

            return quick_gelu_in_place(y)
        return torch.ops.aten.gelu_(y) if on_gpu and activation == "gelu" else ACTIVATIONS[activation](y)

    def linear_and_gate(self, x: Any, linear: Any) -> torch.Tensor | Fp8Rows:
        """A linear layer of x [n, in], a tensor or Fp8Rows, whose rows are gates and then as many values, [n, 2 * size]
        -> silu(gate) * value [n, size]."""
        return self.layers.silu_and_multiply(linear(x), self.fp8)


PLAIN = TowerKernels()


def gpu_kernels(
    attention: str = "default", within: VarlenAttention = attend_within, epilogue: bool = False, fp8: bool = False
) -> TowerKernels:
    """A GPU's: attention by the name of ATTENTIONS."""
    chosen = ATTENTIONS[attention]
    if fp8 and attention == CLASS_APART:
        chosen = partial(chosen, fp8=True)
    return TowerKernels(chosen, within, layer_kernels("cuda"), epilogue, fp8)


def varlen_backends(device: torch.device, equal: bool) -> dict[str, VarlenAttention]:
    """A GPU's ways for pictures of any sizes; ``equal``: those that want them of one size too."""
    return {
        "default": attend_within,
        **{name: partial(attend_within, backend=BACKENDS[name]) for name in ("cudnn", "flash") if equal},
        "torch varlen": attend_in_torch,
        **{name: partial(attend_in_triton, plan=plan) for name, plan in triton_configs(device).items()},
    }


#: e4m3's largest number of each mantissa, the likeliest last
_LARGEST_BY_MANTISSA = (240.0, 256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0)
_FEW = 32


def requantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As quantize_weight, but a row that was dequantized from e4m3 gets its values back, whatever scale it had.

    Its largest value had one of e4m3's eight mantissas. Divided by a scale that gives it that mantissa again, all of
    its values are numbers of e4m3 (the scale may be the old one times a power of two).
    """
    values, scales = quantize_weight(weight)
    largest = scales * LARGEST
    for number in _LARGEST_BY_MANTISSA:
        nearby = largest / number
        if not _exact(weight[:, :_FEW], nearby, largest)[1].any():  # as with all weights that never were e4m3
            continue
        candidate, exact = _exact(weight, nearby, largest)
        values.view(torch.uint8)[exact] = candidate.view(torch.uint8)[exact]
        scales[exact] = nearby[exact]
    return values, scales


def _exact(weight: torch.Tensor, scales: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in e4m3 by these scales, and for which rows nothing but float32's own rounding is lost."""
    values = (weight / scales[:, None]).to(E4M3)
    error = (values.float() * scales[:, None] - weight).abs().amax(1)
    return values, error <= 1e-6 * largest


class Fp8Linear(nn.Module):
    """Takes rows of any floating dtype, which it quantizes, or Fp8Rows; gives rows of ``dtype``.

    Its tensors are buffers, which ``Module.to(dtype)`` would convert: a tower takes it in when it has its own dtype.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """weight e4m3 [out, in], scales float32 [out], bias [out] of any floating dtype."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.to(dtype))

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear, dtype: torch.dtype, device: torch.device | str) -> Fp8Linear:
        """The layer quantized, on the ``device`` on which it is to stay; without loss where it came from e4m3."""
        weight, scales = requantized(linear.weight.detach().to(device))
        return cls(weight, scales, None if linear.bias is None else linear.bias.detach().to(device), dtype)

    def forward(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if isinstance(x, torch.Tensor):
            shape, rows = x.shape, quantize_rows(x.reshape(-1, self.in_features))
        else:
            shape, rows = x.values.shape, Fp8Rows(x.values.flatten(0, -2), x.scales.flatten(0, -2))
        return fp8_linear(rows, self.weight, self.scales, self.bias, self.dtype).unflatten(0, shape[:-1])
