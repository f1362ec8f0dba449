"""How much of the drafts a step verifies, by what steps cost: which way gives more tokens a second."""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

import numpy as np

from tessera.engine.drafts.drafter import Proposal
from tessera.engine.scheduling.policies import Load

_TRIED = 8  # numbers of rows between none and all


def lengths(load: Load, proposals: SequenceType[Proposal], decoding: int, tokens: int, most: int) -> list[int]:
    """How many tokens of each draft a step verifies, at most ``most`` together: those that are likeliest to be right,
    as many as give the most tokens a second.

    ``decoding``: tokens that the step gives without them; ``tokens``: that it runs without them.
    """
    owner = np.repeat(np.arange(len(proposals)), [len(each.tokens) for each in proposals])
    right = np.concatenate([each.share ** np.arange(1, len(each.tokens) + 1) for each in proposals])
    likeliest = np.argsort(-right, kind="stable")[:most]  # of one draft in its order
    gained = right[likeliest].cumsum()
    best = _rate(load, decoding, tokens)
    rows = 0
    for tried in sorted({len(likeliest) * part // _TRIED for part in range(1, _TRIED + 1)} - {0}):
        rate = _rate(load, decoding + gained[tried - 1], tokens + tried)
        if rate >= best:
            best, rows = rate, tried
    return np.bincount(owner[likeliest[:rows]], minlength=len(proposals)).tolist()


def _rate(load: Load, given: float, run: int) -> float:
    return given / max(1.0, load.costs.step_ns(run) + load.host_ns)
