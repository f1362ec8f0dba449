"""A request's own draft of its answer: what follows there where the answer stands."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.engine.drafts.alignment import Alignment, SuffixAutomaton

NEAR = 4  # tokens ahead: so far a single one that agrees is believed
PIECE = 256  # tokens read at a call: no step waits for a long draft


class TextDraft:
    """Proposes what follows in ``tokens``, from their beginning on.

    After a mismatch the answer stands where its longest end occurs that has two tokens or is near; until there is one,
    its tokens are taken to stand in the place of the draft's, one for one.
    """

    prior = 0.9

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._automaton = SuffixAutomaton()
        self._alignment = Alignment(self._automaton)
        self._read = 0  # of the answer's tokens
        self._place = -1  # in the draft, of the last of them

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """At most this many tokens, maybe none, for an answer so far that only ever grows."""
        begin = len(self._automaton.tokens)
        self._automaton.extend(self._tokens[begin : begin + PIECE])
        for at in range(self._read, len(outputs)):
            self._alignment.take(outputs, at)
            found = self._alignment.place
            if found is not None and (self._alignment.length > 1 or 0 < found - self._place <= NEAR):
                self._place = found
            else:
                self._place = min(self._place + 1, len(self._tokens))
        self._read = len(outputs)
        return self._tokens[self._place + 1 : self._place + 1 + most]
