"""How small a margin may be at which a first, cheap answer still counts, so that with a stated confidence no more than
a stated share of all answers differs from what the full cut would have said (docs/cascade.md).

Learn then Test (Angelopoulos, Bates, Candès, Jordan and Lei 2021, "Learn then Test: Calibrating predictive algorithms
to achieve risk control"): each threshold is a hypothesis that too many answers would differ. Thresholds stand in an
order that no data chose, the safest first, and each is tested at the whole level until one is not rejected
(fixed-sequence testing), so that the chance of ever taking one that breaks the bound is at most 1 - confidence. An
answer differs or does not, so a hypothesis' p-value is the binomial's own tail, which holds for any number of pictures
(Clopper and Pearson 1934).

This takes pictures and questions to be drawn independently from what will be asked, and the model not to change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, log, log1p

THRESHOLDS = (*(round(64 / 2 ** (step / 16), 4) for step in range(16 * 12 + 1)), 0.0)
"""Nats, from the safest on; at the last nothing is ever escalated."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One threshold: how many answers with this margin or more differ, and how likely so few are if the bound fails."""

    threshold: float
    differ: int
    p_value: float


def tail(events: int, of: int, share: float) -> float:
    """The chance of at most ``events`` among ``of`` that each have this chance (0 < share < 1): the binomial's tail."""
    if events >= of:
        return 1.0
    likeliest = min(events, int((of + 1) * share))
    ways = lgamma(of + 1) - lgamma(likeliest + 1) - lgamma(of - likeliest + 1)
    most = exp(ways + likeliest * log(share) + (of - likeliest) * log1p(-share))
    odds, total = share / (1 - share), most
    term = most
    for count in range(likeliest, 0, -1):
        term *= count / ((of - count + 1) * odds)
        total += term
    term = most
    for count in range(likeliest, events):
        term *= (of - count) * odds / (count + 1)
        total += term
    return min(total, 1.0)


def upper_limit(events: int, of: int, confidence: float) -> float:
    """What a share is at most, with this confidence, of which ``events`` among ``of`` (1 or more) were seen."""
    if events >= of:
        return 1.0
    low, high = events / of, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(events, of, middle) > 1 - confidence else (low, middle)
    return high


def needed(disagree: float, confidence: float, differ: int = 0) -> int:
    """The fewest answers of which ``differ`` may differ for the bound to hold with this confidence."""
    most = differ + 1
    while tail(differ, most, disagree) > 1 - confidence:
        most *= 2
    return bisect_left(range(most), -(1 - confidence), key=lambda of: -tail(differ, of, disagree))


def choose(answers: Sequence[tuple[float, bool]], disagree: float, confidence: float) -> tuple[float, list[Tried]]:
    """The least threshold, in nats, that holds the bound, and what was tried up to the first that does not.

    ``answers``: each one's margin and whether it differs from the full cut's. The threshold is infinite, all are to be
    escalated, where not even the first one holds: fewer than :func:`needed`, or wrong where the model is surest.
    """
    wrong = sorted(margin for margin, differs in answers if differs)
    chosen, tried = inf, list[Tried]()
    for threshold in THRESHOLDS:
        differ = len(wrong) - bisect_left(wrong, threshold)
        tried.append(Tried(threshold, differ, tail(differ, len(answers), disagree)))
        if tried[-1].p_value > 1 - confidence:
            break
        chosen = threshold
    return chosen, tried
