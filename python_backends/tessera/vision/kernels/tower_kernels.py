"""The parts of a tower that can be computed in more than one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from tessera.vision.kernels.attention import BACKENDS, attend


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
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")


def add_and_norm(x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """x and update [..., size] -> (norm(x + update), x + update)."""
    x = x if update is None else x + update
    return norm(x), x


def linear_and_activate(x: torch.Tensor, linear: nn.Linear, activation: str) -> torch.Tensor:
    """A linear layer and one of ACTIVATIONS."""
    return ACTIVATIONS[activation](linear(x))


@dataclass(frozen=True)
class TowerKernels:
    """The functions above, or faster ones with the same arguments; ``add_and_norm`` may then write its sum into x."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = attend
    add_and_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_and_norm
    linear_and_activate: Callable[[torch.Tensor, nn.Linear, str], torch.Tensor] = linear_and_activate


PLAIN = TowerKernels()


def gpu_kernels(attention: str, epilogue: bool) -> TowerKernels:
    """A GPU's: attention by the key of BACKENDS ("default": torch chooses), a GELU as an epilogue or by itself."""
    return TowerKernels(
        attend=partial(attend, backend=BACKENDS.get(attention)),
        add_and_norm=_add_and_norm_at_once,
        linear_and_activate=linear_with_epilogue if epilogue else linear_and_activate_in_place,
    )


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
    x: torch.Tensor, update: torch.Tensor | None, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    from tessera.vision.kernels.add_layer_norm import MAX_SIZE, add_layer_norm

    if isinstance(norm, nn.LayerNorm) and x.shape[-1] <= MAX_SIZE:
        return add_layer_norm(x, update, norm.weight, norm.bias, norm.eps)
    return add_and_norm(x, update, norm)
