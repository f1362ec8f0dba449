"""Numbers of an answer that begin as others shortly before them did: in a layout the edges of blocks, which stand in
columns, and each of which begins where the one above it ends.

A number is a run of tokens that have nothing but digits, one or several to a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

BEFORE = 4  # numbers that the next one may begin like: of a block in a layout, all of the one before
CONTEXT = 3  # tokens in front of a number that are none themselves: by these its place is told from others
LONGEST_NUMBER = 8  # tokens: what is longer is none of those that come again
LIKELY = 0.4  # that a token of a number is right, or a proposal ends in front of it
_RECENT = 31 / 32  # what is known counts as, once more is known
_UNKNOWN = 0.25, 1.0  # right, and tried, as long as nothing is known
_MOST = 1024  # places that are told apart

#: the context, and how many tokens of the number are known
Place: TypeAlias = tuple[tuple[int, ...], int]
#: right, and tried, of the tokens that stand there in each of the last numbers, the latest first
Known: TypeAlias = list[tuple[float, float]]
#: the context, the last numbers, the latest first, and the number that an answer is in the middle of
_Read: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]

_NOTHING: Known = [_UNKNOWN] * BEFORE


class Habits:
    """How often a number was like another at its place, in all answers of one name; about 1,000 bytes a place. The
    one that was not seen for longest goes first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Place, Known] = OrderedDict()

    def of(self, place: Place) -> Known:
        """Not to be changed."""
        return self._known.get(place, _NOTHING)

    def learned(self, place: Place) -> Known:
        """The same, to be changed: it was seen again."""
        if place in self._known:
            self._known.move_to_end(place)
            return self._known[place]
        if len(self._known) >= _MOST:
            self._known.popitem(last=False)
        return self._known.setdefault(place, [*_NOTHING])


class Numbers:
    """Those of one answer. ``tokens``: that have nothing but digits."""

    def __init__(self, tokens: frozenset[int], habits: Habits) -> None:
        self._tokens, self._habits = tokens, habits
        self._read: _Read = (), (), ()

    def read(self, tokens: Iterable[int]) -> None:
        """The answer's next tokens."""
        for token in tokens:
            if token in self._tokens:
                context, before, begun = self._read
                said = len(begun)
                known = self._habits.learned((context, said))
                for back, number in enumerate(before):
                    if len(number) > said and number[:said] == begun:
                        right, tried = known[back]
                        known[back] = right * _RECENT + (number[said] == token), tried * _RECENT + 1
            self._read = self._with(self._read, token)

    def filled(self, text: Sequence[int]) -> list[int]:
        """How the answer goes on if it does as ``text``, but for its numbers, in whose places are those that are
        likely; it ends in front of the first that is not."""
        tokens, read = list[int](), self._read
        for token in text:
            if token in self._tokens:
                context, before, begun = read
                likely, said = LIKELY, len(begun)
                for number, (right, tried) in zip(before, self._habits.of((context, said))):
                    if right > likely * tried and len(number) > said and number[:said] == begun:
                        likely, token = right / tried, number[said]
                if likely == LIKELY:
                    break
            read = self._with(read, token)
            tokens.append(token)
        return tokens

    def _with(self, read: _Read, token: int) -> _Read:
        context, before, begun = read
        if token in self._tokens:
            return (context, before, (*begun, token)) if len(begun) < LONGEST_NUMBER else read
        if begun:
            before = (begun, *before[: BEFORE - 1])
        return (*context[1 - CONTEXT :], token), before, ()
