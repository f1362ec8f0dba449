"""The parts of a tower that can be computed in more than one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from tessera.fp8.rows import Fp8Rows
from tessera.vision.kernels.attention import (
    BACKENDS,
    CLASS_APART,
    Attend,
    attend,
    attend_class_apart,
    attend_within,
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


def add_and_norm(x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """x and update [..., size] -> (norm(x + update), x + update)."""
    x = x if update is None else x + update
    return norm(x), x


def linear_and_activate(x: torch.Tensor, linear: nn.Module, activation: str) -> torch.Tensor:
    """A linear layer and one of ACTIVATIONS."""
    return ACTIVATIONS[activation](linear(x))


@dataclass(frozen=True)
class TowerKernels:
    """The functions above, or faster ones with the same arguments; ``add_and_norm`` may then write its sum into x.

    What goes into a linear layer next may come as Fp8Rows, which only an Fp8Linear takes.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | Fp8Rows] = attend
    attend_within: Callable[[Sequence[int]], Attend] = attend_within
    add_and_norm: Callable[..., tuple[torch.Tensor | Fp8Rows, torch.Tensor]] = add_and_norm
    linear_and_activate: Callable[..., torch.Tensor | Fp8Rows] = linear_and_activate


PLAIN = TowerKernels()


def gpu_kernels(attention: str, epilogue: bool) -> TowerKernels:
    """A GPU's: attention by the name of ATTENTIONS, a GELU as an epilogue or by itself."""
    return TowerKernels(
        attend=ATTENTIONS[attention],
        add_and_norm=_add_and_norm_at_once,
        linear_and_activate=linear_with_epilogue if epilogue else linear_and_activate_in_place,
    )


def fp8_kernels(attention: str) -> TowerKernels:
    """A GPU's for a tower of Fp8Linear: what is computed in front of one quantizes its rows in the same pass."""
    return TowerKernels(
        attend=partial(attend_class_apart, fp8=True) if attention == CLASS_APART else ATTENTIONS[attention],
        add_and_norm=partial(_add_and_norm_at_once, fp8=True),
        linear_and_activate=linear_and_gelu_rows,
    )


def linear_and_gelu_rows(x: torch.Tensor | Fp8Rows, linear: nn.Module, activation: str) -> torch.Tensor | Fp8Rows:
    """Every GELU is computed in its tanh form, see :func:`linear_with_epilogue`."""
    if activation not in GELUS:
        return ACTIVATIONS[activation](linear(x))
    if isinstance(linear, nn.Linear):  # a projector that the checkpoint left as it was
        assert isinstance(x, torch.Tensor)
        return linear_and_activate_in_place(x, linear, activation)
    from tessera.vision.kernels.gelu_rows import gelu_rows

    return gelu_rows(linear(x))


def linear_and_activate_in_place(x: torch.Tensor, linear: nn.Linear, activation: str) -> torch.Tensor:
    """The exact GELU over the layer's own output, which saves that much memory."""
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


def _add_and_norm_at_once(
    x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module, fp8: bool = False
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    from tessera.vision.kernels.add_layer_norm import MAX_SIZE, add_layer_norm

    if isinstance(norm, nn.LayerNorm) and x.shape[-1] <= MAX_SIZE:
        return add_layer_norm(x, update, norm.weight, norm.bias, norm.eps, fp8)
    return add_and_norm(x, update, norm)
