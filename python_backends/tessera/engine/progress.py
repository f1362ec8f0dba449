"""What steps did to sequences, and how long it may wait before text is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tessera.engine.request import Usage
from tessera.engine.sequence import SampledToken, Sequence

HOLD_S = 0.02
MOST_TOKENS = 8


@dataclass(frozen=True)
class Progress:
    """One sequence took ``tokens``, or ended for ``reason``, or both; still without text.

    A step makes one token at most; a Gatherer puts several together. ``usage`` counts up to the last of them.
    """

    sequence: Sequence
    usage: Usage
    tokens: tuple[SampledToken, ...] = ()
    reason: str | None = None
    error: str | None = None


class Gatherer:
    """Puts the tokens of a request together: its text is decoded, and sent, once for several of them.

    The first token goes at once; later ones when 8 are there, after 20 ms, or with the last. An answer that is not
    streamed waits for its end, unless its text must be searched for a stop string meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Sequence, list[Progress]] = {}
        self._since: dict[Sequence, float] = {}  # of those that may not wait for their end, the longest held first

    def add(self, steps: list[Progress]) -> list[Progress]:
        """Takes what steps did; returns what is due now."""
        due = [progress for step in steps if (progress := self._take(step)) is not None]
        now = self._clock()
        while self._since:
            sequence, since = next(iter(self._since.items()))
            if since + HOLD_S > now:
                break
            due.append(self._let_go(sequence))
        return due

    def wait_s(self) -> float | None:
        """Until when something held is due; None if nothing is."""
        since = next(iter(self._since.values()), None)
        return None if since is None else max(0.0, since + HOLD_S - self._clock())

    def _take(self, step: Progress) -> Progress | None:
        sequence = step.sequence
        held = self._held.setdefault(sequence, [])
        held.append(step)
        if step.reason is not None:
            return self._let_go(sequence)
        if _watched(sequence):
            if len(held) >= MOST_TOKENS or len(held) == step.usage.completion_tokens:
                return self._let_go(sequence)
            self._since.setdefault(sequence, self._clock())
        return None

    def _let_go(self, sequence: Sequence) -> Progress:
        self._since.pop(sequence, None)
        held = self._held.pop(sequence)
        return replace(held[-1], tokens=tuple(token for step in held for token in step.tokens))


def _watched(sequence: Sequence) -> bool:
    """Whether somebody looks at the answer before its end: a client, or the search for a stop string."""
    return sequence.request.stream or bool(sequence.request.sampling.stop)
