"""How much of what is proposed a step verifies, and whether it waits until it can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.engine.drafts.drafter import Proposal
from tessera.engine.scheduling.policies import Load

_TRIED = 8  # numbers of rows between none and all


def draft_lengths(load: Load, proposals: Sequence[Proposal], decoding: int, tokens: int, most: int) -> list[int]:
    """How many tokens of each draft a step verifies, at most ``most`` together: those that are likeliest to be right,
    as many as give the most tokens a second by what steps cost.

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


def tokens_should_be_known(load: Load, prompts: int) -> bool:
    """Whether sequences get on faster by steps that are planned once the tokens of the one before are known, though the
    device waits meanwhile: all may then go on, and their drafts be verified. Else each that ``waits`` for its token has
    only every second step: where the token's mask is yet to be made, or a draft gives more than one token in its turn.
    Each counts by the share of its tokens that planning ahead leaves it, for answers with long drafts end soon anyway.

    ``prompts``: tokens of prompts in a step. Steps that are planned ahead are more for the same tokens of answers, and
    need not read more prompts: of these only the first has any.
    """
    ahead = rows_ahead = rows_known = 0.0
    for sequence in load.running:
        rows = gain = 0.0
        if sequence.drafting is not None and (sequence.outputs or sequence.in_flight):
            unknown = sequence.in_flight + len(sequence.draft)
            rows, gain = sequence.drafting.expected(sequence.outputs, unknown, load.drafts)
        rows_known += 1 + rows
        sequence.waits = sequence.awaits_token or gain > 1
        ahead += 1 / 2 if sequence.waits else 1 / (1 + gain)
        rows_ahead += (1 + rows) / 2 if sequence.waits else 1
    known, step_ns = len(load.running), load.costs.step_ns
    longer = ahead * step_ns(prompts + rows_ahead) + (known - ahead) * step_ns(rows_ahead)
    return longer > ahead * (step_ns(prompts + rows_known) + load.host_ns)


def _rate(load: Load, given: float, run: int) -> float:
    return given / max(1.0, load.costs.step_ns(run) + load.host_ns)
