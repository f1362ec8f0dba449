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

    ``usage`` counts up to the last of the tokens.
    """

    sequence: Sequence
    usage: Usage
    tokens: tuple[SampledToken, ...] = ()
    reason: str | None = None
    error: str | None = None

    def then(self, later: Progress) -> Progress:
        """This and what followed, as one."""
        return replace(later, tokens=self.tokens + later.tokens)


class Gatherer:
    """Puts the tokens of a request together: its text is decoded, and sent, once for several of them.

    The first token goes at once; later ones when 8 are there, after 20 ms, or with the last. An answer that is not
    streamed waits for its end, unless its text must be searched for a stop string meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Sequence, Progress] = {}
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
        held = self._held.get(sequence)
        self._held[sequence] = held.then(step) if held is not None else step
        if self._goes_now(self._held[sequence]):
            return self._let_go(sequence)
        if held is None and _watched(sequence):
            self._since[sequence] = self._clock()
        return None

    def _goes_now(self, progress: Progress) -> bool:
        if progress.reason is not None:
            return True
        if not _watched(progress.sequence):
            return False
        return len(progress.tokens) >= MOST_TOKENS or len(progress.tokens) == progress.usage.completion_tokens

    def _let_go(self, sequence: Sequence) -> Progress:
        self._since.pop(sequence, None)
        return self._held.pop(sequence)


def _watched(sequence: Sequence) -> bool:
    """Whether somebody looks at the answer before its end: a client, or the search for a stop string."""
    return sequence.request.stream or bool(sequence.request.sampling.stop)
