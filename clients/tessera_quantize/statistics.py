"""What all methods need to know of a linear layer's inputs, however many rows of them there were."""

from __future__ import annotations

import torch


class InputStatistics:
    """Of the inputs x of one linear layer, gathered from rows [n, in_features].

    An error D of the weight changes the outputs by x D^T, whose mean square over the rows is trace(D H D^T) for
    H = mean(x^T x): so GPTQ's Hessian is all that AWQ's search and every error of the report need as well.
    """

    def __init__(self, in_features: int, device: torch.device) -> None:
        self._weight = torch.zeros((), dtype=torch.float32, device=device)
        self._squares = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self._magnitudes = torch.zeros(in_features, dtype=torch.float32, device=device)

    def add(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        """x [n, in_features] of any floating dtype, ``weights`` float32 [n]: how much each row counts."""
        wide = x.detach().float()
        weighted = wide * weights[:, None]
        self._weight += weights.sum()
        self._squares.addmm_(weighted.T, wide)
        self._magnitudes += weighted.abs().sum(0)

    @property
    def hessian(self) -> torch.Tensor:
        """mean(x^T x), float32 [in_features, in_features]."""
        return self._squares / self._weight

    @property
    def magnitudes(self) -> torch.Tensor:
        """mean(|x|) of each column, float32 [in_features]."""
        return self._magnitudes / self._weight


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """The mean square that a ``difference`` [out, in] of the weight makes in the outputs, summed over them."""
    return float(((difference @ hessian) * difference).sum())
