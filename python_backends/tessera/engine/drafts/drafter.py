"""The contract of what proposes tokens, and what came of one sequence's proposals.

A draft changes no answer: a token is chosen from its row's logits by argmax, or by one number that is a hash of seed
and place, so the rows behind a draft that was right so far choose what single steps would have chosen.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol


class Drafter(Protocol):
    """Proposes how one answer may go on."""

    #: the share of its tokens that is likely to be right, as long as nothing is known
    prior: float
    #: tokens for which it is not asked again what a step may expect of it: where no draft pays, nearly all that
    #: drafters cost is that they are asked whether one would
    holds: int

    def propose(self, outputs: Sequence[int], most: int) -> Sequence[int]:
        """At most ``most`` tokens, maybe none, for an answer so far that only ever grows."""


class Proposal(NamedTuple):
    """Tokens, and the share of such that was right lately: the n-th is right with the n-th power of it."""

    tokens: Sequence[int]
    share: float


class Expected(NamedTuple):
    """Of a step that may verify a draft: rows of it, and tokens that come of these."""

    rows: float
    gain: float


_RECENT = 7 / 8  # what is known of a drafter counts as, once more is known
_AGAIN = 1 / 2  # as long as nothing is known
_MISSES = 2  # in a row are no accident
_LONGEST_REST = 32  # tokens
_PACE = 1 / 16  # so fast a prior moves towards what came of another answer's first proposal
_NO_GUESS = -1, -1
_NOTHING = Proposal((), 0.0)
_NO_GAIN = Expected(0.0, 0.0)


class Standing:
    """A drafter of one answer, and what is known of it.

    The first token of a proposal that is not verified is held against the one that comes, which costs the device
    nothing. A drafter that was wrong twice in a row must be right so before more of it is verified, and is asked again
    after 1, 2, 4, up to 32 tokens; each time that it is right takes back one that it was not. What the first proposals
    of earlier answers came to is the prior of the next (``priors``, by type). So where nothing is right, next to
    nothing is asked and verified.
    """

    def __init__(self, drafter: Drafter, priors: dict[type, float]) -> None:
        self._drafter = drafter
        self._priors = priors
        self._right, self._tried = priors.setdefault(type(drafter), drafter.prior), 1.0
        self._new = True
        self._misses = 0
        self._rests_until = 0  # a place in the answer
        self._guess = _NO_GUESS  # a place, and the token there

    @property
    def share(self) -> float:
        """Of the tokens, that was right lately."""
        return self._right / self._tried

    def propose(self, outputs: Sequence[int], most: int) -> Sequence[int]:
        """What the drafter does, unless it must first be right."""
        place, token = self._guess
        if 0 <= place < len(outputs):
            self.learn(int(outputs[place] == token), int(outputs[place] != token))
        if len(outputs) < self._rests_until:
            return ()
        tokens = self._drafter.propose(outputs, most)
        self._guess = (len(outputs), tokens[0]) if tokens else _NO_GUESS
        return tokens if self._misses < _MISSES else ()

    def learn(self, right: int, wrong: int) -> None:
        """How many of the last proposal's tokens were right, and how many behind them wrong."""
        kind = type(self._drafter)
        if self._new:
            self._priors[kind] += (bool(right) - self._priors[kind]) * _PACE
            self._new = False
        self._right = self._right * _RECENT + right
        self._tried = self._tried * _RECENT + right + wrong
        self._misses = min(self._misses, _MISSES) - 1 if right and self._misses else self._misses + (not right)
        if self._misses >= _MISSES:
            self._rests_until = self._guess[0] + min(_LONGEST_REST, 1 << self._misses - _MISSES)
        self._guess = _NO_GUESS


class Drafting:
    """One sequence's drafters in their order: the first that proposes anything is verified.

    ``proposed`` and ``accepted`` count the tokens that were verified, and those of them that were right.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, priors: dict[type, float] | None = None) -> None:
        """Proposals end before the first token that is not below ``vocab_size``. ``priors`` are what is known of all
        answers' drafters; new ones come in."""
        self.proposed = self.accepted = 0
        self._vocab_size = vocab_size
        known = {} if priors is None else priors
        self._standings = [Standing(drafter, known) for drafter in drafters]
        self._last = self._standings[0]  # whose the last proposal was
        self._again = _AGAIN  # how often one that was verified was followed by another at once
        self._verified = False  # the last one, and nothing was proposed since
        self._expected = _NO_GAIN  # of the last one that was asked for
        self._asked_until = 0  # a place in the answer, up to which that holds
        self._holds = min(drafter.holds for drafter in drafters)

    def propose(self, outputs: Sequence[int], most: int) -> Proposal:
        """What is proposed for the next step of an answer so far, maybe nothing."""
        proposal = self._first(outputs, most)
        if self._verified:
            self._again += (bool(proposal.tokens) - self._again) * (1 - _RECENT)
            self._verified = False
        return proposal

    def _first(self, outputs: Sequence[int], most: int) -> Proposal:
        for each in self._standings:
            tokens = each.propose(outputs, most)
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
                tokens = list(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))
            if tokens:
                self._last = each
                return Proposal(tokens, each.share)
        return _NOTHING

    def learn(self, proposed: int, accepted: int) -> None:
        """How many tokens of the last proposal were verified, one or more, and how many of these were right."""
        self.proposed += proposed
        self.accepted += accepted
        self._verified, self._asked_until = True, 0
        self._last.learn(accepted, int(accepted < proposed))

    def expected(self, outputs: Sequence[int], unknown: int, most: int) -> Expected:
        """What a step may verify that knows the ``unknown`` tokens that are yet to follow ``outputs``; more than one
        are those of a draft, and another such is expected behind it as often as there was one so far: mostly what
        could not be foretold comes first."""
        if unknown > 1:
            rows = unknown - 1
            return Expected(self._again * rows, self._again * _right(self._last.share, rows))
        if len(outputs) >= self._asked_until:
            tokens, share = self.propose(outputs, most + unknown)
            rows = max(0, len(tokens) - unknown)
            self._expected = Expected(rows, share**unknown * _right(share, rows)) if tokens else _NO_GAIN
            self._asked_until = len(outputs) + self._holds
        return self._expected


def _right(share: float, tokens: int) -> float:
    """How many of these are likely to be, up to the first that is not."""
    return share * (1 - share**tokens) / (1 - share) if share < 1 else tokens
