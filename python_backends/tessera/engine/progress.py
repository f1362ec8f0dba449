"""What a step did to requests, as the engine tells it: plain data, cheap to send to another process."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.engine.labels import LabelAnswer
from tessera.engine.sequence import Report


@dataclass(frozen=True, slots=True)
class End:
    """A request's last news. ``reason``: see TokenEvent's ``finish_reason``; ``error``: words for the client.

    Times are on time.monotonic_ns's clock, 0 where it did not happen.
    """

    number: int
    reason: str
    error: str | None = None
    cached_tokens: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    labels: LabelAnswer | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did: a token each for some requests, by number and with its report, then the requests that ended.

    Exactly one End of a request is ever told, and nothing of it afterwards.
    """

    tokens: list[tuple[int, int, Report | None]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.ends)
