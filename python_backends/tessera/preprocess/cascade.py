"""A cascade: a picture is cut coarsely first, and finely only where the first answer's margin is small.

The margin, in nats: of labels the log odds of the best against the second, of other answers the least distance between
a token and the next likely one, over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import InvalidRequest
from tessera.models.tile_policy import stated_keys
from tessera.prompt.sampling import LARGEST, POLICY_KEYS, SamplingParameters
from tessera_wire import MOST_TOKENS, question_class

KEYS = ("first", "full", "margin", "classes")


@dataclass(frozen=True)
class Cascade:
    """``first`` and ``full``: tile policies as a request has them; no ``first`` is the least detail that the family
    knows. The full cut is asked where the first one's answer has less than ``margin`` nats; questions of one of the
    ``classes`` have margins of their own. ``planned``: whether the deployment says all this.
    """

    margin: float
    first: Any = None
    full: Any = field(default_factory=dict)
    classes: Mapping[str, float] = field(default_factory=dict)
    planned: bool = False

    @staticmethod
    def read(tile_policy: Any, planned: bool = False) -> Cascade | None:
        """What a ``tile_policy`` states; None where that is no cascade. Raises InvalidRequest."""
        stated = stated_keys(tile_policy)
        if "cascade" not in stated:
            return None
        asked = stated.pop("cascade")
        if stated:
            raise _beside(next(iter(stated)))
        if not isinstance(asked, Mapping) or "margin" not in asked:
            raise InvalidRequest(f"tile policy: cascade must be an object with a margin, not {asked!r:.50}")
        unknown = sorted(str(key) for key in asked if key not in KEYS)
        if unknown:
            raise InvalidRequest(f"tile policy: cascade: unknown key {unknown[0]!r:.50}; known are {', '.join(KEYS)}")
        classes = asked.get("classes") or {}
        if not isinstance(classes, Mapping):
            raise InvalidRequest(f"tile policy: cascade: classes must be an object of margins, not {classes!r:.50}")
        margins = {str(name): _margin(f"classes[{name!r:.40}]", value) for name, value in classes.items()}
        full = {} if asked.get("full") is None else asked["full"]
        return Cascade(_margin("margin", asked["margin"]), asked.get("first"), full, margins, planned)

    @staticmethod
    def of(
        sampling: Mapping[str, Any], parameters: SamplingParameters, planned: Cascade | None = None
    ) -> Cascade | None:
        """The cascade of one request, if it has one. Raises InvalidRequest.

        Args:
            sampling: its sampling parameters as they came.
            parameters: the same, read.
            planned: the deployment's, for requests that say nothing of how pictures are cut and can have a margin.
        """
        said = [name for name in POLICY_KEYS if sampling.get(name) is not None]
        misfit = _misfit(parameters)
        if not said:
            return None if misfit else planned
        cascade = Cascade.read(sampling["tile_policy"]) if "tile_policy" in said else None
        if cascade is None:
            return None
        if len(said) > 1:
            raise _beside(said[1])
        if misfit:
            raise InvalidRequest(f"tile policy: {misfit}")
        return cascade

    def margin_of(self, question: str) -> float:
        """That which a question's answer needs."""
        return self.classes.get(question_class(question), self.margin) if self.classes else self.margin


def _misfit(parameters: SamplingParameters) -> str | None:
    """Why an answer can have no margin."""
    if parameters.temperature > 0:
        return "cascade and temperature exclude each other; drawn tokens have no margin"
    if parameters.choices is None and not 0 < (parameters.max_tokens or 0) <= MOST_TOKENS:
        return f"cascade takes short answers alone: send choices, or max_tokens of at most {MOST_TOKENS}"
    return None


def _beside(name: str) -> InvalidRequest:
    return InvalidRequest(f"tile policy: {name!r:.50} beside cascade; state it in cascade's first or full")


def _margin(name: str, value: Any) -> float:
    number = math.inf if value == "inf" else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise InvalidRequest(f"tile policy: cascade: {name} must be a number from 0 on or 'inf', not {value!r:.50}")
    return float(number) if number < LARGEST else math.inf
