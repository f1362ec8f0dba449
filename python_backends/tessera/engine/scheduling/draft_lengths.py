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
    lengths = np.array([len(each.tokens) for each in proposals])
    owner = np.arange(len(proposals)).repeat(lengths)
    place = np.arange(1, len(owner) + 1) - (lengths.cumsum() - lengths)[owner]
    right = np.array([each.share for each in proposals])[owner] ** place
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
    """Whether a step is worth more that is planned once the tokens of the one before are known, though the device
    waits meanwhile: sequences may then go on that else run in every second step or third only, and drafts be verified.

    ``prompts``: tokens of prompts in a step. Steps that are planned ahead are more for the same tokens of answers, and
    need not read more prompts: of these only the first has any. None is shorter than the host is busy with it: JSON by
    one schema, 64 in flight, on an H200 8.9 ms, for 87 rows that take the device 5.9; and 13 ms for 253 with the wait.
    So each kind of step is as long as the host was with the last ones of its kind.

    An answer whose draft is being verified sits out a step that is planned ahead: where such are in flight, the first
    of these has that many tokens less.
    """
    known = rows_known = ahead = rows_ahead = 0.0
    verified = 0
    for sequence in load.running:
        rows = gain = 0.0
        if sequence.drafting is not None and (sequence.outputs or sequence.in_flight):
            unknown = sequence.in_flight + len(sequence.draft)
            rows, gain = sequence.drafting.expected(sequence.outputs, unknown, load.drafts)
        known += 1 + gain
        rows_known += 1 + rows
        turns = sequence.turns
        if turns > 1:  # it waits for its token anyway, and may be drafted for in its turn
            ahead += (1 + gain) / turns
            rows_ahead += (1 + rows) / turns
        else:
            ahead += 1
            rows_ahead += 1
            verified += bool(sequence.draft)
    step_ns, busy = load.costs.step_ns, load.busy
    first, others = (max(busy[False].ns, step_ns(run)) for run in (prompts + rows_ahead - verified, rows_ahead))
    longer = ahead * first + (known - ahead + verified) * others
    return longer > ahead * max(busy[True].ns, step_ns(prompts + rows_known) + load.between.ns)


def _rate(load: Load, given: float, run: int) -> float:
    return given / max(1.0, load.costs.step_ns(run) + load.between.ns)
