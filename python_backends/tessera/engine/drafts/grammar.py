"""What the form of an answer leaves no choice about: keys, brackets, all but the first of an enumeration's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.engine.structured_output.constraints import Matcher


class ForcedRuns:
    """Proposes for the answer that a matcher follows; ``most``: tokens that are ever asked for at once."""

    prior = 1.0

    def __init__(self, matcher: Matcher, most: int) -> None:
        self._matcher = matcher
        matcher.look_ahead(most)

    def propose(self, outputs: Sequence[int], most: int) -> Sequence[int]:
        """As :meth:`tessera.engine.drafts.drafter.Drafter.propose`."""
        return self._matcher.forced[:most]
