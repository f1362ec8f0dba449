"""Where an answer stands in a text that is known: a suffix automaton of that text, and the answer's place in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

LONGEST = 32  # tokens by which places are told apart
MOST_PLACES = 64  # that are looked at for one token
CERTAIN = 3  # tokens that agree are no accident


class SuffixAutomaton:
    """All that occurs in ``tokens``, which may grow: 1.4 us and about 400 bytes a token.

    A state stands for the strings that end at the same places. The longest of them has ``lengths[state]`` tokens, the
    others are its ends that are longer than what ``links[state]`` stands for; ``firsts[state]`` is the first of the
    places, ``ways[state]`` the state after each token that follows at one of them (Blumer et al., 1985).
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, list[int]] = {}
        """Of each token, ascending."""
        self.ways: list[dict[int, int]] = [{}]
        self.links, self.lengths, self.firsts = [-1], [0], [-1]
        self._whole = 0  # the state of all tokens so far
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        ways, links, lengths = self.ways, self.links, self.lengths
        place, new, state = len(self.tokens), len(ways), self._whole
        self.tokens.append(token)
        self.places.setdefault(token, []).append(place)
        self._add({}, 0, place + 1, place)
        self._whole = new
        while state >= 0 and token not in ways[state]:
            ways[state][token] = new
            state = links[state]
        if state < 0:
            return
        known = ways[state][token]
        if lengths[known] == lengths[state] + 1:
            links[new] = known
            return
        short = len(ways)  # what ends here too leaves the longer strings of its state
        self._add(dict(ways[known]), links[known], lengths[state] + 1, self.firsts[known])
        while state >= 0 and ways[state].get(token) == known:
            ways[state][token] = short
            state = links[state]
        links[known] = links[new] = short

    def _add(self, ways: dict[int, int], link: int, length: int, first: int) -> None:
        self.ways.append(ways)
        self.links.append(link)
        self.lengths.append(length)
        self.firsts.append(first)


class Alignment:
    """Of an answer with an automaton's tokens, in amortized constant time a token.

    ``length``: tokens of the answer's longest end that occurs there. ``place``: of its last token there, None for a
    length of 0. Of several occurrences (told apart by at most 32 tokens) it is the first after the last place at which
    three tokens agreed, and where there is none the first of all.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.length = 0
        self.place: int | None = None
        self._state = 0
        self._certain = -1

    def take(self, outputs: Sequence[int], at: int) -> None:
        """The answer's next token is ``outputs[at]``; those before it were taken, or count for nothing."""
        automaton, token = self.automaton, outputs[at]
        ways, links, lengths = automaton.ways, automaton.links, automaton.lengths
        state, length = self._state, self.length
        while state and length <= lengths[links[state]]:  # the text has grown, and the state was split
            state = links[state]
        while state and token not in ways[state]:
            state = links[state]
            length = lengths[state]
        if token not in ways[state]:
            self._state, self.length, self.place = 0, 0, None
            return
        self._state, self.length = ways[state][token], length + 1
        self.place = self._occurrence(outputs, at)
        if self.length >= CERTAIN:
            self._certain = self.place

    def _occurrence(self, outputs: Sequence[int], at: int) -> int:
        automaton = self.automaton
        count = min(self.length, LONGEST)
        end, places = list(outputs[at + 1 - count : at + 1]), automaton.places[outputs[at]]
        after = bisect_right(places, max(self._certain, count - 2))
        for place in places[after : after + MOST_PLACES]:
            if automaton.tokens[place + 1 - count : place + 1] == end:
                return place
        return automaton.firsts[self._state]
