"""A cascade: a picture is cut coarsely first, and finely only where the first answer's margin is small.

The margin, in nats: of labels the log odds of the best against the second, of other answers the least distance between
a token and the next likely one, over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tessera.errors import InvalidRequest
from tessera.models.tile_policy import stated_keys
from tessera.preprocess.preprocessor import PreprocessRequest
from tessera.prompt.sampling import LARGEST, POLICY_KEYS, SamplingParameters

MOST_TOKENS = 16  # of an answer that is no label: each token's margin counts, and nothing is told before the last
KEYS = ("first", "full", "margin")


@dataclass(frozen=True)
class Cascade:
    """``first`` and ``full``: tile policies as a request has them. None is, as the first, the least detail that the
    family knows, and as the full one the deployment's. The full cut is asked where the first one's answer has less than
    ``margin``."""

    margin: float
    first: Any = None
    full: Any = None

    @staticmethod
    def of(sampling: Mapping[str, Any], parameters: SamplingParameters) -> Cascade | None:
        """What a request's ``tile_policy`` asks for; None where that is no cascade. Raises InvalidRequest.

        Args:
            sampling: its sampling parameters as they came.
            parameters: the same, read.
        """
        stated = {} if sampling.get("tile_policy") is None else stated_keys(sampling["tile_policy"])
        if "cascade" not in stated:
            return None
        asked = stated.pop("cascade")
        beside = [*stated, *(name for name in POLICY_KEYS[1:] if sampling.get(name) is not None)]
        if beside:
            raise InvalidRequest(f"tile policy: {beside[0]!r:.50} beside cascade; state it in cascade's first or full")
        if not isinstance(asked, Mapping) or "margin" not in asked:
            raise InvalidRequest(f"tile policy: cascade must be an object with a margin, not {asked!r:.50}")
        unknown = sorted(str(key) for key in asked if key not in KEYS)
        if unknown:
            raise InvalidRequest(f"tile policy: cascade: unknown key {unknown[0]!r:.50}; known are {', '.join(KEYS)}")
        if parameters.temperature > 0:
            raise InvalidRequest("tile policy: cascade and temperature exclude each other; drawn tokens have no margin")
        if parameters.choices is None and not 0 < (parameters.max_tokens or 0) <= MOST_TOKENS:
            raise InvalidRequest(
                f"tile policy: cascade takes short answers alone: send choices, or max_tokens of at most {MOST_TOKENS}"
            )
        return Cascade(_margin(asked["margin"]), asked.get("first"), asked.get("full"))

    def cuts(self, request: PreprocessRequest) -> tuple[PreprocessRequest, PreprocessRequest]:
        """The request with its first cut and with its full one."""
        full = replace(request, tile_policy=self.full)
        return replace(full, low=True) if self.first is None else replace(full, tile_policy=self.first), full


def _margin(value: Any) -> float:
    number = math.inf if value == "inf" else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise InvalidRequest(f"tile policy: cascade: margin must be a number from 0 on or 'inf', not {value!r:.50}")
    return float(number) if number < LARGEST else math.inf
