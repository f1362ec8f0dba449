"""Who goes first, wherever requests wait: the lower priority, and with time whoever waits.

A rank never changes, so nobody is passed for ever: whoever comes so much later that waiting has made up for its better
priority stands behind.
"""

from __future__ import annotations

# A minute of waiting is worth one step of priority: longer than a job whose requests fill the server waits (512 of them
# 5 to 60 s), so that its oldest do not stand in the way of a person's question; short enough that a job at priority 10
# gets on after ten minutes of nothing but questions.
STEP_NS = 60_000_000_000
# Whoever asked a question may ask the next: this long it is expected, and no step is launched behind a long one.
EXPECTED_NS = 30_000_000_000


def rank(priority: int, arrived_ns: int) -> int:
    """Lower goes first; equal priorities go in the order in which they arrived."""
    return arrived_ns + priority * STEP_NS


class Expected:
    """The best priority of late, with which a request may come at any time."""

    def __init__(self) -> None:
        self._best = self._seen_ns = 0
        self._any = False

    def saw(self, priority: int, now_ns: int) -> None:
        """A request of this priority came."""
        if not self._any or priority <= self._best or now_ns - self._seen_ns > EXPECTED_NS:
            self._best, self._seen_ns, self._any = priority, now_ns, True

    def above(self, priority: int) -> bool:
        """Whether a request that goes before those of this priority is expected."""
        return self._any and self._best < priority
