"""What one step runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tessera.engine.sequence import Sequence


@dataclass(slots=True)  # not frozen: one is made for every token, and that takes three times as long
class ScheduledSpan:
    """Positions [start, end) of one sequence; ``samples`` when the step chooses the token after them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ScheduledBatch:
    """The spans of one step, packed one after the other; those of a single token come first."""

    spans: list[ScheduledSpan]

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.spans)

    @cached_property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token, in the batch's order."""
        return [span.sequence for span in self.spans if span.samples]
