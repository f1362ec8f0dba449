"""What a step costs, as steps so far have told."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

_RECENT = 8  # steps; others had company on the GPU


class CostModel:
    """The time of a step by its tokens: of each power of two the fastest of the recent steps, and straight lines
    between. Where nothing is known a step costs nothing.

    ``measured``: tokens and nanoseconds of steps at start-up.
    """

    def __init__(self, measured: Iterable[tuple[int, int]] = ()) -> None:
        self._recent: dict[int, deque[tuple[float, int]]] = {}  # by power of two: ns a token, tokens
        self._fastest: dict[int, tuple[float, int]] = {}
        self._tokens: list[float] = [0.0]
        self._ns: list[float] = [0.0]
        for tokens, ns in measured:
            self.record(tokens, ns)

    def record(self, tokens: int, ns: int) -> None:
        """A step of this many tokens took this long."""
        power = (tokens - 1).bit_length()
        recent = self._recent.setdefault(power, deque(maxlen=_RECENT))
        recent.append((ns / tokens, tokens))
        if (fastest := min(recent)) != self._fastest.get(power):
            self._fastest[power] = fastest
            known = sorted((tokens, ns_a_token * tokens) for ns_a_token, tokens in self._fastest.values())
            self._tokens = [0.0, *(tokens for tokens, _ in known)]
            # One that was held up, as by a compilation, took no longer by itself than those of more tokens.
            self._ns = [0.0, *[*accumulate((ns for _, ns in reversed(known)), min)][::-1]]

    def step_ns(self, tokens: float) -> float:
        """How long a step of this many tokens takes."""
        return _between(tokens, self._tokens, self._ns)

    def tokens_within(self, ns: float) -> float:
        """How many tokens a step may have that takes no longer; 0 where nothing is known."""
        return _between(ns, self._ns, self._tokens)


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """y at x by the points' straight lines, beyond the last one in proportion; points ascend, the first is (0, 0)."""
    place = min(bisect_left(xs, x), len(xs) - 1)
    if x > xs[place]:
        return ys[place] * x / xs[place] if xs[place] else 0.0
    if not place or xs[place] == x:
        return ys[place]
    part = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + part * (ys[place] - ys[place - 1])
