"""Muon: momentum whose update is replaced by the nearest orthogonal matrix, all matrices of one shape at a time.

The same rule as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`; stacking equal shapes makes a step of this
model's 60 small matrices an eighth of the kernel launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] to matrices with the same singular vectors and singular values near 1 (bfloat16)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class StackedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for parameters of two or more dimensions (further ones count as columns)."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[tuple(parameter.shape)].append(parameter)
            for shape, parameters in shapes.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                torch._foreach_lerp_(gradients, moments, group["momentum"])
                updates = (
                    orthogonalize(torch.stack(gradients).flatten(2))
                    .view(len(parameters), *shape)
                    .to(parameters[0].dtype)
                )
                columns = parameters[0].numel() // shape[0]
                rate = group["lr"] * 0.2 * max(shape[0], columns) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-rate)


class MatricesAndRest:
    """Muon for the weight matrices inside some modules, AdamW at half its rate for every other parameter."""

    def __init__(
        self,
        inside: Iterable[torch.nn.Module],
        parameters: Iterable[torch.nn.Parameter],
        lr: float,
        device: torch.device,
    ):
        matrices = [p for part in inside for n, p in part.named_parameters() if n.endswith("weight") and p.ndim >= 2]
        taken = {id(p) for p in matrices}
        rest = [p for p in parameters if id(p) not in taken]
        self.muon = StackedMuon(matrices, lr=lr, weight_decay=0.02)
        self.adamw = torch.optim.AdamW(
            rest, lr=lr / 2, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.lr = lr

    def step(self, factor: float) -> None:
        """One update at ``factor`` times the rate; gradients are gone after it."""
        for optimizer, rate in ((self.muon, self.lr), (self.adamw, self.lr / 2)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
