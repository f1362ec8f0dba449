"""What the setting ``preprocess.tile_policy`` says: a tile policy, a cascade of two, or the name of a policy file that
`tessera plan` has written (docs/cascade.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tessera.cascade.watch import Plan
from tessera.errors import ConfigError, InvalidRequest
from tessera.models.tile_policy import stated_keys

AUDIT = 0.01
ON_ALARM = ("report", "escalate")


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
