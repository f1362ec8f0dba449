"""What steps did to requests, and how long it may wait before text is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tessera.engine.request import Request, Usage
from tessera.engine.sequence import SampledToken

HOLD_S = 0.02
MOST_TOKENS = 8


class LabelAnswer(NamedTuple):
    """What scoring labels came to: the best label's text, and one JSON-ready dict a label."""

    best: str
    scores: list[dict[str, Any]]


class Progress(NamedTuple):
    """One request took ``tokens``, or ended for ``reason``, or both; still without text.

    A step makes one token at most; a Gatherer puts several together. ``usage`` counts up to the last of them. Times
    are on time.monotonic_ns's clock, 0 where it did not happen. Exactly one of a request's has a reason: its last.
    """

    request: Request
    usage: Usage
    tokens: tuple[SampledToken, ...] = ()
    reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    labels: LabelAnswer | None = None


class Gatherer:
    """Puts the tokens of a request together: its text is decoded, and sent, once for several of them.

    The first token goes at once; later ones when 8 are there, after 20 ms, or with the last. An answer that is not
    streamed waits for its end, unless its text must be searched for a stop string meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[Request, list[Progress]] = {}
        self._since: dict[Request, float] = {}  # of those that may not wait for their end, the longest held first

    def add(self, steps: list[Progress]) -> list[Progress]:
        """Takes what steps did; returns what is due now."""
        due = [progress for step in steps if (progress := self._take(step)) is not None]
        now = self._clock()
        while self._since:
            request, since = next(iter(self._since.items()))
            if since + HOLD_S > now:
                break
            due.append(self._let_go(request))
        return due

    def wait_s(self) -> float | None:
        """Until when something held is due; None if nothing is."""
        since = next(iter(self._since.values()), None)
        return None if since is None else max(0.0, since + HOLD_S - self._clock())

    def _take(self, step: Progress) -> Progress | None:
        request = step.request
        held = self._held.setdefault(request, [])
        held.append(step)
        if step.reason is not None:
            return self._let_go(request)
        if _watched(request):
            if len(held) >= MOST_TOKENS or len(held) == step.usage.completion_tokens:
                return self._let_go(request)
            self._since.setdefault(request, self._clock())
        return None

    def _let_go(self, request: Request) -> Progress:
        self._since.pop(request, None)
        held = self._held.pop(request)
        return held[-1]._replace(tokens=tuple(token for step in held for token in step.tokens))


def _watched(request: Request) -> bool:
    """Whether somebody looks at the answer before its end: a client, or the search for a stop string."""
    return request.stream or bool(request.sampling.stop)
