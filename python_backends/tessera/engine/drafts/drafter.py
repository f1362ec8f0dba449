"""The contract of what proposes tokens, and what came of one sequence's proposals.

A draft changes no answer: a token is chosen from its row's logits by argmax, or by one number that is a hash of seed
and place, so the rows behind a draft that was right so far choose what single steps would have chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
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


_TRUST = 2  # drafts' worth of tokens that a prior counts as
_RECENT = 7 / 8  # what a draft counts as at the next
# What is expected of the next step moves so fast towards what came of the last one. It begins with a draft of four
# tokens, and goes back there while tokens are not drafted for: so that is tried again now and then.
_PACE = 1 / 8
_FIRST = 4
_FORGETS_IN = 512  # tokens


class Drafting:
    """One sequence's drafters in their order: the first that proposes anything is verified.

    ``proposed`` and ``accepted`` count the tokens that were verified, and those of them that were right.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        """Proposals end before the first token that is not below ``vocab_size``."""
        self.proposed = self.accepted = 0
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._right = [_TRUST * drafter.prior for drafter in drafters]
        self._tried: list[float] = [_TRUST] * len(drafters)
        self._who = 0  # whose draft is verified
        prior = max(drafter.prior for drafter in drafters)
        self._untried = self._lately = Expected(_FIRST * prior, _FIRST * prior**2)
        self._said = 0

    def propose(self, outputs: Sequence[int], most: int) -> Proposal:
        """What is proposed for the next step of an answer so far, maybe nothing."""
        self._lately, self._said = self.expected(len(outputs)), len(outputs)
        for who, drafter in enumerate(self._drafters):
            tokens = drafter.propose(outputs, most)
            known = next((at for at, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
            if known:
                self._who = who
                return Proposal(tokens[:known], self._right[who] / self._tried[who])
        return Proposal((), 0.0)

    def learn(self, proposed: int, accepted: int) -> None:
        """What came of the last proposal, of which so many tokens were verified."""
        rows, gain = self._lately
        self._lately = Expected(rows + (proposed - rows) * _PACE, gain + (accepted - gain) * _PACE)
        if proposed:
            self.proposed += proposed
            self.accepted += accepted
            self._right[self._who] = self._right[self._who] * _RECENT + accepted
            self._tried[self._who] = self._tried[self._who] * _RECENT + accepted + (accepted < proposed)

    def expected(self, said: int) -> Expected:
        """What the step after so many tokens of the answer may verify, if it knows the last of them."""
        forgotten = min(1.0, (said - self._said) / _FORGETS_IN)
        (rows, gain), (rows_first, gain_first) = self._lately, self._untried
        return Expected(rows + (rows_first - rows) * forgotten, gain + (gain_first - gain) * forgotten)
