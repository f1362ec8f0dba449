"""When a failed attempt is worth another, and how long to wait for it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tessera_wire.errors import ConnectionFailed, DeadlineExceeded, InvalidRequest, TesseraClientError, Unavailable

LONGEST = 1e9  # seconds of a timeout: what locks and the wire can hold
ON_THE_WAY_S = 0.5  # the end of an answer, at most


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential backoff with jitter, for the errors that say "not now" (UNAVAILABLE) and for no other.

    attempts: how many tries in all; 1 turns retries off. first_delay, max_delay: seconds; each wait is drawn
    between half and the whole of ``first_delay * 2**n``, at most ``max_delay``.
    """

    attempts: int = 4
    first_delay: float = 0.1
    max_delay: float = 5.0

    @classmethod
    def patient(cls, seconds: float = 120.0) -> Retry:
        """Sits out restarts of the server, for about so long: for batch jobs, where waiting beats failing."""
        return cls(attempts=4 + round(seconds / 3.75))  # most waits are of 2.5 to 5 s

    def delay(self, failed: int, error: TesseraClientError) -> float | None:
        """Seconds to wait after the ``failed``-th attempt (from 1) ended with ``error``; None: give up."""
        if failed >= self.attempts or not isinstance(error, (Unavailable, ConnectionFailed)):
            return None
        whole = min(self.max_delay, self.first_delay * 2.0 ** (failed - 1))
        return whole * random.uniform(0.5, 1.0)


class Deadline:
    """The time a request has over all its attempts; ``seconds`` None is for ever. Raises InvalidRequest."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds <= LONGEST):
            raise InvalidRequest(f"timeout must be a number of seconds up to {LONGEST:g}, or None, got {seconds!r:.80}")
        self.seconds = seconds
        self.started = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def remaining(self) -> float | None:
        """Seconds left; raises DeadlineExceeded when there are none."""
        if self.seconds is None:
            return None
        left = self.seconds - self.elapsed()
        if left <= 0:
            raise self.exceeded()
        return left

    def for_server(self) -> float | None:
        """Seconds that the server is told: fewer, so that what it has by then still arrives. Raises as remaining()."""
        left = self.remaining()
        return None if left is None else left - min(ON_THE_WAY_S, left / 10)

    def allows(self, wait: float) -> bool:
        """Whether time is left after ``wait`` seconds."""
        return self.seconds is None or self.elapsed() + wait < self.seconds

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no complete answer within {self.seconds:g} s", "give a longer timeout= or lower the load"
        )
