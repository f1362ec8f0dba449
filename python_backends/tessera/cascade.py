"""Whether a picture's first, cheap cut is enough: what the setting ``preprocess.tile_policy`` says of it, and whether
what is asked is still what a cascade was planned on (docs/cascade.md).

A plan says how often things happened on its own pictures: that an answer was escalated, that its margin lay below the
lower or above the upper quartile, and how often an answer that was not escalated may differ from the full cut's. Each
is watched for having become more frequent, the first three on every request, the last on those that are audited.

Each event multiplies the evidence by its likelihood under the higher share over that under the planned one, a bet that
wins nothing on average while the planned share holds (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random
variables by betting"). A bet begins with every request, and their sum is the evidence: Shiryaev's and Roberts' rule.
The sum less the number of requests is a martingale, so that without a cause at least :data:`AVERAGE_RUN` requests pass
on average until it reaches that number (Pollak 1985; of shares below the planned one, and of the mean of several such
sums: Shin, Ramdas and Rinaldo 2024, "E-detectors"). Page's CUSUM (1954) is the best of these bets in place of their
sum; when it began is told as the time of the change. No rule finds a change much sooner than in ln(average run) / KL
requests (Lorden 1971), KL being the divergence of the new share from the planned one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tessera.errors import ConfigError, InvalidRequest
from tessera.models.tile_policy import stated_keys

AUDIT = 0.01
ON_ALARM = ("report", "escalate")
AVERAGE_RUN = 200_000
"""Of each of the two tests without a cause, at least: together one false alarm in 100,000 requests."""
RISE = 2.0
"""How many times as frequent an event is then taken to be."""


@dataclass(frozen=True, slots=True)
class Expected:
    """How frequent an event was on the plan's pictures, and the upper limit of its frequency by those."""

    share: float
    limit: float

    @property
    def raised(self) -> float:
        """The share to look for: above the limit, and below 1."""
        return min(max(RISE * self.share, (1 + RISE) / 2 * self.limit), (1 + self.limit) / 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan expects. ``low`` and ``high``: the quartiles of its margins, nats."""

    low: float
    high: float
    escalated: Expected
    below: Expected
    above: Expected
    disagreed: Expected

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Plan:
        """From the object ``watch`` of a policy file. Raises ConfigError naming what is missing or no share."""
        try:
            low, high = float(document["low"]), float(document["high"])
            events = {name: Expected(**document[name]) for name in ("escalated", "below", "above", "disagreed")}
            if unknown := sorted({*document} - {"low", "high", *events}):
                raise ValueError(f"unknown key {unknown[0]!r:.40}")
            for name, event in events.items():
                if not 0 <= event.share <= event.limit <= 1 or event.limit == 0:
                    raise ValueError(f"{name} must have 0 <= share <= limit <= 1, and a limit above 0")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cascade: the policy file's watch cannot be read: {error!r:.200}") from None
        return cls(low, high, **events)


class Rise:
    """The evidence that an event has become more frequent than a plan allows, 0 at first. ``seen`` requests with
    ``events`` among them speak for it the most."""

    def __init__(self, name: str, expected: Expected) -> None:
        self.name, self.expected = name, expected
        usual, raised = expected.limit, expected.raised
        # A limit of 1 allows all.
        self._factors = ((1 - raised) / (1 - usual), raised / usual) if usual < 1 else (0.0, 0.0)
        self.evidence = self._best = 0.0
        self.seen = self.events = 0

    def saw(self, event: bool) -> float:
        """The evidence with one request more."""
        if self._best < 1:
            self._best, self.seen, self.events = 1.0, 0, 0
        self.seen += 1
        self.events += event
        factor = self._factors[event]
        self._best *= factor
        self.evidence = (self.evidence + 1) * factor
        return self.evidence

    def __str__(self) -> str:
        found, share, limit = (
            f"{100 * each:.3g} %" for each in (self.events / self.seen, self.expected.share, self.expected.limit)
        )
        return f"{self.name}: {self.events} of the last {self.seen} ({found}), planned {share} and at most {limit}"


class Watch:
    """Counts a plan's requests and audits. One thread at a time.

    ``alarm``: why it was raised first, in words; empty until then. It stays until there is a new plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked = (
            Rise("answers escalated", plan.escalated),
            Rise(f"margins below {plan.low:.3g}", plan.below),
            Rise(f"margins above {plan.high:.3g}", plan.above),
        )
        self._disagreed = Rise("audited answers that differ from the full cut's", plan.disagreed)
        self.requests = self.escalated = self.audits = self.disagreements = 0
        self.alarm = ""

    def request(self, margin: float, escalated: bool) -> str | None:
        """A request that the plan's thresholds decided, by its first answer's margin in nats (none whose own thresholds
        did). Returns what the alarm is, if this request raises it."""
        self.requests += 1
        self.escalated += escalated
        events = escalated, margin < self._plan.low, margin > self._plan.high
        evidence = sum(rise.saw(event) for rise, event in zip(self._asked, events))
        if self.alarm or evidence < len(self._asked) * AVERAGE_RUN:
            return None
        return self._raise(max(self._asked, key=lambda rise: rise.evidence))

    def audited(self, disagreed: bool) -> str | None:
        """An answer that was not escalated, and whether the full cut's differs. Returns as :meth:`request`."""
        self.audits += 1
        self.disagreements += disagreed
        if self._disagreed.saw(disagreed) < AVERAGE_RUN or self.alarm:
            return None
        return self._raise(self._disagreed)

    def _raise(self, rise: Rise) -> str:
        self.alarm = str(rise)
        return self.alarm


class Policy(NamedTuple):
    """``full``: the tile policy of full cuts; None is the checkpoint's own. ``cascade``: as a request's tile policy has
    it, for requests that have none. ``plan``: what it was planned on, of which the share ``audit`` of the answers to
    first cuts is to tell whether it holds; ``on_alarm``: whether all is escalated where it does not, or only told."""

    full: Any = None
    cascade: Any = None
    plan: Plan | None = None
    audit: float = AUDIT
    on_alarm: str = ON_ALARM[0]


def read_policy(said: Any) -> Policy:
    """Raises ConfigError that names what is wrong."""
    document: Any = {"tile_policy": said}
    if isinstance(said, str) and said.endswith(".json"):
        try:
            document = json.loads(Path(said).read_text(encoding="utf-8"))
            document["tile_policy"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"preprocess: tile_policy: {said} is no policy file: {error!r:.200}") from None
    tile_policy = document["tile_policy"]
    try:
        cascade = None if tile_policy is None else stated_keys(tile_policy).get("cascade")
    except InvalidRequest as error:
        raise ConfigError(f"preprocess: {error}") from None
    if cascade is None:
        return Policy(tile_policy)
    audit, on_alarm = document.get("audit", AUDIT), document.get("on_alarm", ON_ALARM[0])
    if isinstance(audit, bool) or not isinstance(audit, (int, float)) or not 0 <= audit <= 1:
        raise ConfigError(f"preprocess: tile_policy: {said}: audit must be a share from 0 to 1, not {audit!r:.50}")
    if on_alarm not in ON_ALARM:
        raise ConfigError(f"preprocess: tile_policy: {said}: on_alarm must be one of {ON_ALARM}, not {on_alarm!r:.50}")
    full = cascade.get("full") if isinstance(cascade, Mapping) else None
    plan = Plan.read(document["watch"]) if "watch" in document else None
    return Policy(full or None, tile_policy, plan, audit, on_alarm)
