"""A request's own draft of its answer: what follows there where the answer stands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tessera.engine.drafts.occurrences import Occurrences

CERTAIN = 3  # tokens that agree are no accident
LONGEST = 16  # tokens by which places are told apart
MOST_PLACES = 32  # that are looked at for one token, on either side
NEAR = 4  # tokens ahead: so far a single one that agrees is believed
PIECE = 256  # tokens read at a call: no step waits for a long draft


class TextDraft:
    """Proposes what follows in ``tokens``, from their beginning on.

    After a mismatch the answer stands where its longest end occurs that has two tokens, the next such place if there
    are several, or where its last token is near; else that is taken to stand in the place of the draft's.
    """

    prior = 0.9

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._pairs = Occurrences(2)
        self._read = 0  # of the answer's tokens
        self._place = 0  # in the draft, behind the last of them
        self._agreeing = 0  # how many tokens before that place are the answer's

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """At most this many tokens, maybe none, for an answer so far that only ever grows."""
        begin = len(self._pairs.tokens)
        if begin < len(self._tokens):
            self._pairs.extend(self._tokens[begin : begin + PIECE])
        first = max(self._read, len(outputs) - LONGEST)  # what is longer ago changes nothing
        self._place = min(self._place + first - self._read, len(self._tokens))
        for end in range(first + 1, len(outputs) + 1):
            self._follow(outputs, end)
        self._read = len(outputs)
        return self._tokens[self._place : self._place + most]

    def _follow(self, outputs: Sequence[int], end: int) -> None:
        """Where the answer stands with its token before ``end``."""
        near = self._tokens[self._place : self._place + NEAR]
        if near and near[0] == outputs[end - 1]:
            self._place += 1
            self._agreeing += 1
            if self._agreeing >= CERTAIN:
                return
        else:
            self._agreeing = 0
        here, behind = self._place, self._pairs.behind.get(tuple(outputs[max(0, end - 2) : end]), ())
        following = bisect_left(behind, here)
        before = behind[max(0, following - MOST_PLACES) : following]
        for place in (*behind[following : following + MOST_PLACES], *before):
            agreeing = self._pairs.agreeing(place, outputs, end, LONGEST)
            if agreeing > self._agreeing:
                self._place, self._agreeing = place, agreeing
        if not self._agreeing:
            if outputs[end - 1] in near:
                self._place, self._agreeing = here + 1 + near.index(outputs[end - 1]), 1
            else:
                self._place = min(here + 1, len(self._tokens))
