"""Numbers of an answer that begin as others shortly before them did: in a layout the edges of blocks, which stand in
columns, and each of which begins where the one above it ends.

A number is a run of tokens that have nothing but digits, one or several to a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

BEFORE = 4  # numbers that the next one may begin like: of a block in a layout, all of the one before
CONTEXT = 3  # tokens in front of a number that are none themselves: by these its place is told from others
LIKELY = 0.4  # that all numbers of a proposal are right, or it ends in front of them
_RECENT = 31 / 32  # what is known counts as, once more is known
_UNKNOWN = 0.25, 1.0  # right, and tried, as long as nothing is known
_MOST = 4096  # places that are told apart


class Habits:
    """How often a number was like another at its place, in all answers of one name."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def share(self, place: tuple[object, ...]) -> float:
        right, tried = self._known.get(place, _UNKNOWN)
        return right / tried

    def learn(self, place: tuple[object, ...], right: bool) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        before, tried = self._known.get(place, _UNKNOWN)
        self._known[place] = before * _RECENT + right, tried * _RECENT + 1


class _Read(NamedTuple):
    """``before``: the last numbers, the latest first. ``begun``: the one that an answer is in the middle of."""

    context: tuple[int, ...] = ()
    before: tuple[tuple[int, ...], ...] = ()
    begun: tuple[int, ...] = ()


class Numbers:
    """Those of one answer. ``tokens``: that have nothing but digits."""

    def __init__(self, tokens: frozenset[int], habits: Habits) -> None:
        self._tokens, self._habits = tokens, habits
        self._read = _Read()

    def read(self, tokens: Iterable[int]) -> None:
        """The answer's next tokens."""
        for token in tokens:
            if token in self._tokens:
                for place, guess in self._guesses(self._read):
                    self._habits.learn(place, guess == token)
            self._read = self._with(self._read, token)

    def filled(self, text: Sequence[int]) -> list[int]:
        """How the answer goes on if it does as ``text``, but for its numbers, in whose places are those that are
        likely; what is behind one that nothing is known of is left out."""
        tokens, read, likely = list[int](), self._read, 1.0
        for token in text:
            if token in self._tokens:
                share, token = max(
                    ((self._habits.share(place), guess) for place, guess in self._guesses(read)), default=(0.0, token)
                )
                likely *= share
                if likely < LIKELY:
                    break
            read = self._with(read, token)
            tokens.append(token)
        return tokens

    def _with(self, read: _Read, token: int) -> _Read:
        context, before, begun = read
        if token in self._tokens:
            return _Read(context, before, (*begun, token))
        if begun:
            before = (begun, *before[: BEFORE - 1])
        return _Read((*context[1 - CONTEXT :], token), before, ())

    def _guesses(self, read: _Read) -> Iterable[tuple[tuple[object, ...], int]]:
        """By each of the last numbers that begins as this one did: the place, and the token there."""
        context, before, begun = read
        said = len(begun)
        for back, number in enumerate(before):
            if len(number) > said and number[:said] == begun:
                yield (context, back, said), number[said]
