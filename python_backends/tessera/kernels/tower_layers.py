"""The parts of a tower that can be computed in more than one way.

A linear layer of a tower in FP8: e4m3 weights, a scale an output channel; a scale a row of what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from tessera.kernels.fp8_rows import E4M3, LARGEST, Fp8Rows, fp8_linear, quantize_rows, quantize_weight
from tessera.kernels.tower_attention import (
    BACKENDS,
    CLASS_APART,
    Within,
    attend,
    attend_class_apart,
    attend_in_torch,
    attend_in_triton,
    attend_within,
    plans_of_ours,
)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_tanh_gelu = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
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
Turned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def add_and_norm(x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """x and update [..., size] -> (norm(x + update), x + update)."""
    x = x if update is None else x + update
    return norm(x), x


def linear_and_activate(x: torch.Tensor, linear: nn.Module, activation: str) -> torch.Tensor:
    """A linear layer and one of ACTIVATIONS."""
    return ACTIVATIONS[activation](linear(x))


def turned(qkv: torch.Tensor, turns: torch.Tensor) -> Turned:
    """qkv [patches, 3, heads, size] of any floating dtype -> query, key and value [patches, heads, size], pair i (i and
    size / 2 + i) of the first two turned by the angle whose cosine and sine are turns[:, patch, i], in float32.
    """
    first, second = qkv[:, :2].float().chunk(2, dim=-1)
    cosine, sine = turns[:, :, None, None]
    rows = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(qkv.dtype)
    return rows[:, 0], rows[:, 1], qkv[:, 2]


@dataclass(frozen=True)
class TowerKernels:
    """The functions above, or faster ones with the same arguments; ``add_and_norm`` may then write its sum into x, and
    ``turn`` its rows into qkv.

    What goes into a linear layer next may come as Fp8Rows, which only an Fp8Linear takes.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | Fp8Rows] = attend
    attend_within: Within = attend_within
    turn: Callable[[torch.Tensor, torch.Tensor], Turned] = turned
    add_and_norm: Callable[..., tuple[torch.Tensor | Fp8Rows, torch.Tensor]] = add_and_norm
    linear_and_activate: Callable[..., torch.Tensor | Fp8Rows] = linear_and_activate


PLAIN = TowerKernels()


def within_ways(device: torch.device, equal: bool) -> dict[str, Within]:
    """A GPU's ways for pictures of any sizes; ``equal``: those that want them of one size too."""
    return {
        "default": attend_within,
        **{name: partial(attend_within, backend=BACKENDS[name]) for name in ("cudnn", "flash") if equal},
        "torch varlen": attend_in_torch,
        **{name: partial(attend_in_triton, plan=plan) for name, plan in plans_of_ours(device).items()},
    }


def gpu_kernels(attention: str, epilogue: bool, within: Within = attend_within) -> TowerKernels:
    """A GPU's: attention by the name of ATTENTIONS, a GELU as an epilogue or by itself."""
    return TowerKernels(
        attend=ATTENTIONS[attention],
        attend_within=within,
        turn=_turned_in_place,
        add_and_norm=_add_and_norm_at_once,
        linear_and_activate=linear_with_epilogue if epilogue else linear_and_activate_in_place,
    )


def fp8_kernels(attention: str, within: Within = attend_within) -> TowerKernels:
    """A GPU's for a tower of Fp8Linear: what is computed in front of one quantizes its rows in the same pass."""
    return TowerKernels(
        attend=partial(attend_class_apart, fp8=True) if attention == CLASS_APART else ATTENTIONS[attention],
        attend_within=within,
        turn=_turned_in_place,
        add_and_norm=partial(_add_and_norm_at_once, fp8=True),
        linear_and_activate=linear_and_gelu_rows,
    )


def linear_and_gelu_rows(x: torch.Tensor | Fp8Rows, linear: nn.Module, activation: str) -> torch.Tensor | Fp8Rows:
    """Every GELU but quick_gelu is computed in its tanh form, see :func:`linear_with_epilogue`."""
    if activation not in (*GELUS, "quick_gelu"):
        return ACTIVATIONS[activation](linear(x))
    if isinstance(linear, nn.Linear):  # a projector that the checkpoint left as it was
        assert isinstance(x, torch.Tensor)
        return linear_and_activate_in_place(x, linear, activation)
    from tessera.kernels.activation import gelu_rows

    return gelu_rows(linear(x), quick=activation == "quick_gelu")


def linear_and_activate_in_place(x: torch.Tensor, linear: nn.Linear, activation: str) -> torch.Tensor:
    """The exact GELU, or quick_gelu, over the layer's own output, which saves that much memory."""
    if activation == "quick_gelu" and linear.out_features % 8 == 0:
        from tessera.kernels.activation import quick_gelu_in_place

        return quick_gelu_in_place(linear(x))
    if activation != "gelu":
        return linear_and_activate(x, linear, activation)
    return torch.ops.aten.gelu_(linear(x))


def linear_with_epilogue(x: torch.Tensor, linear: nn.Linear, activation: str) -> torch.Tensor:
    """A GELU applied by the matrix product before it writes: on a GPU cuBLAS's, which is the tanh form.

    That differs from the exact one by at most 5e-4 (below 16-bit rounding around the values that matter), and it
    takes float32 sums where the exact one takes their 16-bit roundings. Not for float32.
    """
    if activation not in GELUS:
        return linear_and_activate(x, linear, activation)
    rows = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
    return rows.unflatten(0, x.shape[:-1])


def _turned_in_place(qkv: torch.Tensor, turns: torch.Tensor) -> Turned:
    from tessera.kernels.rotary import turn_heads

    turn_heads(qkv, turns)
    return qkv[:, 0], qkv[:, 1], qkv[:, 2]


def _add_and_norm_at_once(
    x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module, fp8: bool = False
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    from tessera.kernels.norm import MAX_SIZE, add_layer_norm

    if isinstance(norm, nn.LayerNorm) and x.shape[-1] <= MAX_SIZE:
        return add_layer_norm(x, update, norm.weight, norm.bias, norm.eps, fp8)
    return add_and_norm(x, update, norm)


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
