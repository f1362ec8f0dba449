"""The contract of what proposes tokens, and what came of one sequence's proposals.

A draft changes no answer: a token is chosen from its row's logits by argmax, or by one number that is a hash of seed
and place, so the rows behind a draft that was right so far choose what single steps would have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol


class Drafter(Protocol):
    """Proposes how one answer may go on."""

    @property
    def prior(self) -> float:
        """The share of its tokens that is likely to be right, as long as nothing is known."""
        ...

    def propose(self, outputs: Sequence[int], most: int) -> Sequence[int]:
        """At most ``most`` tokens, maybe none, for an answer so far that only ever grows."""
        ...


class Proposal(NamedTuple):
    """Tokens, and the share of such that was right lately: the n-th is right with the n-th power of it."""

    tokens: Sequence[int]
    share: float


class Expected(NamedTuple):
    """Of a step that may verify a draft: rows of it, and tokens that come of these."""

    rows: float
    gain: float


_TRUST = 2  # tokens that a prior counts as
_RECENT = 7 / 8  # what is known of a drafter counts as, once more is known
_PACE = 1 / 8  # so fast what is expected moves towards what came of the last draft


class Drafting:
    """One sequence's drafters in their order: the first that proposes anything is verified.

    ``proposed`` and ``accepted`` count the tokens that were verified, and those of them that were right. Where none is
    verified, the first that is proposed is held against the one that comes: so it is known which are worth a wait.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        """Proposals end before the first token that is not below ``vocab_size``."""
        self.proposed = self.accepted = 0
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._right = [_TRUST * drafter.prior for drafter in drafters]
        self._tried: list[float] = [_TRUST] * len(drafters)
        self._who = 0  # whose the last proposal was
        self._lately = Expected(0.0, 0.0)
        self._guess: tuple[int, int, int] | None = None  # a place in the answer, the token there, and whose guess it is

    def propose(self, outputs: Sequence[int], most: int) -> Proposal:
        """What is proposed for the next step of an answer so far, maybe nothing."""
        if self._guess is not None and self._guess[0] < len(outputs):
            place, token, who = self._guess
            self._guess = None
            self._count(who, int(outputs[place] == token), int(outputs[place] != token))
        for who, drafter in enumerate(self._drafters):
            tokens = drafter.propose(outputs, most)
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
                tokens = list(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))
            if tokens:
                self._who = who
                return Proposal(tokens, self._right[who] / self._tried[who])
        return Proposal((), 0.0)

    def learn(self, proposed: int, accepted: int) -> None:
        """What came of the last proposal: how many of its tokens were verified, and how many of these were right."""
        rows, gain = self._lately
        self._lately = Expected(rows + (proposed - rows) * _PACE, gain + (accepted - gain) * _PACE)
        if proposed:
            self.proposed += proposed
            self.accepted += accepted
            self._count(self._who, accepted, int(accepted < proposed))

    def expected(self, outputs: Sequence[int], unknown: int, most: int) -> Expected:
        """What a step may verify that knows the ``unknown`` tokens that are yet to follow ``outputs``; more than one
        are those of a draft."""
        if unknown > 1:
            return self._lately
        tokens, share = self.propose(outputs, most + unknown)
        if not tokens:
            return Expected(0.0, 0.0)
        if unknown:
            self._guess = len(outputs), tokens[0], self._who
        rows = len(tokens) - unknown
        return Expected(rows, share**unknown * sum(share**place for place in range(1, rows + 1)))

    def _count(self, who: int, right: int, wrong: int) -> None:
        self._right[who] = self._right[who] * _RECENT + right
        self._tried[who] = self._tried[who] * _RECENT + right + wrong
