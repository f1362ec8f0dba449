"""Drafts out of text that is known: of a request's own draft what follows where the answer stands; of its prompt and
of earlier answers what followed the answer's last tokens where they occurred before.

Earlier answers are shared by name alone: one without a name leaves nothing behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from tessera.engine.drafts.numbers import Habits, Numbers
from tessera.engine.sequence import Request, with_marks
from tessera.engine.structured_output.labels import label_token_ids

if TYPE_CHECKING:
    from tessera.prompt.tokenizer import Tokenizer

LONGEST = 16  # tokens by which places are told apart
PIECE = 512  # tokens of a text read at a call: no step waits for a long one
# Of a request's own draft:
CERTAIN = 3  # tokens that agree are no accident
MOST_PLACES = 32  # that are looked at for one token, on either side
MOST_OF_PAIR = 512  # of two tokens the last places, among which these are
NEAR = 4  # tokens ahead: so far a single one that agrees is believed
# Of prompts and earlier answers:
PROMPT_TOKENS = 2048  # the last ones of a prompt that are read
LEAST = 4  # tokens that must have occurred
LATEST = 8  # places of a text that are looked at
MOST_IN_VAIN = 4  # searches in a row: then 8 tokens pass before the next
BETWEEN = -1
"""In a token's place: what stands before it is not followed by what comes after it."""
_NUMBER = -2  # in the place of each, where numbers are alike


class Occurrences:
    """Where each ``order`` tokens in a row occur in ``tokens``, where all ``numbers`` are alike, as ``alike`` has them.
    The text may grow, at 0.3 us and about 150 bytes a token, most of it once it is asked for.

    Places are found by a hash of the tokens in front: two may share one, so :meth:`agreeing` has the last word.
    """

    def __init__(self, order: int, tokens: Sequence[int] = (), numbers: frozenset[int] = frozenset()) -> None:
        self.tokens: list[int] = []
        self.alike = [] if numbers else self.tokens
        self._order, self._numbers = order, numbers
        # Of a hash the last place, and of each place the one before it, 0: none. Lists of places, one a hash, would be
        # as many objects for the collector to visit.
        self._latest: dict[int, int] = {}
        self._before = [0] * order
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        if self._numbers:
            self.alike += alike(tokens, self._numbers)

    def look(self) -> None:
        """Reads what is new, sooner than :meth:`behind` would."""
        said, latest, before = self.alike, self._latest, self._before
        for place in range(len(before), len(said) + 1):
            key = hash(tuple(said[place - self._order : place]))
            before.append(latest.get(key, 0))
            latest[key] = place

    def behind(self, row: tuple[int, ...], most: int) -> list[int]:
        """Places behind these tokens, the latest first."""
        self.look()
        place, found = self._latest.get(hash(row), 0), list[int]()
        while place and len(found) < most:
            found.append(place)
            place = self._before[place]
        return found

    def agreeing(self, place: int, answer: Sequence[int], end: int, most: int, beyond: int = 0) -> int:
        """How many tokens before ``place``, up to ``most``, are those of an answer before ``end``, whose numbers are
        as :func:`alike` has them; 0 where they are no more than ``beyond``."""
        tokens, most = self.alike, min(most, place, end)
        if most <= beyond or tokens[place - beyond - 1 : place] != answer[end - beyond - 1 : end]:
            return 0
        if tokens[place - most : place] == answer[end - most : end]:  # in layouts mostly
            return most
        count = beyond + 1
        while tokens[place - 1 - count] == answer[end - 1 - count]:
            count += 1
        return count


def alike(tokens: Iterable[int], numbers: frozenset[int]) -> list[int]:
    """The tokens with one and the same in the place of each number."""
    return [_NUMBER if token in numbers else token for token in tokens]


class TextDraft:
    """Proposes what follows in ``tokens``, from their beginning on.

    After a mismatch the answer stands where its longest end occurs that has two tokens, the next such place if there
    are several, or where its last token is near; else that is taken to stand in the place of the draft's.
    """

    prior = 0.9
    holds = 4

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._pairs = Occurrences(2)
        self._read = 0  # of the answer's tokens
        self._place = 0  # in the draft, behind the last of them
        self._agreeing = CERTAIN  # how many tokens before that place are the answer's; both begin at their beginning

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """At most this many tokens, maybe none, for an answer so far that only ever grows."""
        end = self._place + len(outputs) - self._read
        if self._agreeing >= CERTAIN and self._tokens[self._place : end] == outputs[self._read :]:  # mostly
            self._agreeing += end - self._place
            self._place = end
        else:
            begin = len(self._pairs.tokens)
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
        here = self._place
        behind = self._pairs.behind(tuple(outputs[max(0, end - 2) : end]), MOST_OF_PAIR)[::-1]
        following = bisect_left(behind, here)
        before = behind[max(0, following - MOST_PLACES) : following]
        for place in (*behind[following : following + MOST_PLACES], *before):
            if agreeing := self._pairs.agreeing(place, outputs, end, LONGEST, beyond=max(1, self._agreeing)):
                self._place, self._agreeing = place, agreeing
        if not self._agreeing:
            if outputs[end - 1] in near:
                self._place, self._agreeing = here + 1 + near.index(outputs[end - 1]), 1
            else:
                self._place = min(here + 1, len(self._tokens))


def with_draft(request: Request, tokenizer: Tokenizer) -> Request:
    """The same with the tokens of the draft that it asks for, if any."""
    if (draft := request.sampling.draft) is None:
        return request
    return replace(request, draft=label_token_ids(draft, partial(tokenizer.encode, special=True)))  # tables' marks, say


def read_tokens(input_ids: np.ndarray, spans: np.ndarray) -> list[int]:
    """A prompt's tokens with BETWEEN where each picture stands; the arguments are as in Request."""
    return with_marks(input_ids, spans, repeat(BETWEEN))[-PROMPT_TOKENS:].tolist()


class EarlierAnswers:
    """The last answers by name: of each name between ``tokens`` and twice as many tokens, of at most ``names`` names;
    the one that was not used for longest goes first. By default 131,072 tokens, in 20 MB, and the habits of their
    numbers in 16. ``numbers``: the tokens that have nothing but digits."""

    def __init__(self, numbers: frozenset[int] = frozenset(), names: int = 16, tokens: int = 4096) -> None:
        self.numbers = numbers
        self._names, self._tokens = names, tokens
        self._of: OrderedDict[str, tuple[list[Occurrences], Habits]] = OrderedDict()

    def of(self, name: str) -> Sequence[Occurrences]:
        """The newest first."""
        return self._kept(name)[0] if name in self._of else ()

    def habits(self, name: str) -> Habits:
        """Of their numbers."""
        return self._kept(name)[1]

    def add(self, name: str, answer: Sequence[int]) -> None:
        """Keeps the beginning of an answer that is as long as all that is kept."""
        kept, _ = self._kept(name)
        if len(kept[0].tokens) + len(answer) > self._tokens and kept[0].tokens:
            kept[:] = [self._nothing(), kept[0]]
        kept[0].extend([*answer[: self._tokens], BETWEEN])
        kept[0].look()  # the device does not wait for it now

    def _kept(self, name: str) -> tuple[list[Occurrences], Habits]:
        if name not in self._of:
            self._of[name] = [self._nothing()], Habits()
        self._of.move_to_end(name)
        if len(self._of) > self._names:
            self._of.popitem(last=False)
        return self._of[name]

    def _nothing(self) -> Occurrences:
        return Occurrences(LEAST, numbers=self.numbers)


class Suffixes:
    """Proposes for one answer, once its last four tokens or more occurred before, what followed where the most did, of
    such places at the newest, and no more tokens than occurred: in answers without boilerplate, longer drafts are
    nearly all wrong.

    In a layout or a list numbers change and what is between them does not. So they are alike where places are sought,
    and, unless the text agrees number by number as far as is looked, those that are proposed are not its own
    (:class:`~tessera.engine.drafts.numbers.Numbers`).

    ``prompt``: as :func:`read_tokens` has it. ``name``: of the earlier answers.
    """

    prior = 0.4
    holds = 4

    def __init__(self, prompt: Sequence[int], earlier: EarlierAnswers, name: str) -> None:
        self._unread = list(prompt)
        self._answer, self._prompt = (Occurrences(LEAST, numbers=earlier.numbers) for _ in range(2))
        self._earlier, self._name = earlier, name
        self._text, self._place = self._answer, 0  # whose tokens from there on are proposed
        self._agreeing = self._same = 0  # how many before that place are the answer's, numbers alike, and all of them
        self._in_vain = self._rests_until = 0  # how often nothing was found in a row; a place in the answer

    @cached_property
    def _numbers(self) -> Numbers:  # made at the first call, by the thread that steps: requests come by another one
        return Numbers(self._earlier.numbers, self._earlier.habits(self._name))

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """As :meth:`tessera.engine.drafts.drafter.Drafter.propose`. Where nothing was found it looks again after 1, 2,
        4, up to 8 tokens: each time costs the host 10 us, and most answers have nothing of others."""
        if len(outputs) < self._rests_until:
            return []
        if self._unread:
            self._prompt.extend(self._unread[:PIECE])
            del self._unread[:PIECE]
        new = list(outputs[len(self._answer.tokens) :])
        self._answer.extend(new)
        self._numbers.read(new)
        if not self._goes_on(new):
            self._seek()
        found = self._text.tokens[self._place : self._place + min(most, self._agreeing)]
        if BETWEEN in found:
            del found[found.index(BETWEEN) :]
        self._in_vain = 0 if found or len(outputs) < LEAST else min(self._in_vain + 1, MOST_IN_VAIN)
        self._rests_until = len(outputs) + (1 << self._in_vain >> 1)
        return found if self._same >= LONGEST else self._numbers.filled(found)

    def _goes_on(self, new: list[int]) -> bool:
        """Whether a text all of which agreed, as far as is looked, went on as the answer did: mostly, and a search for
        another place, that agrees no less, takes as long as all else."""
        end, said = self._place + len(new), self._answer.alike
        if self._agreeing < LONGEST or end >= len(self._text.tokens):
            return False
        if self._text.alike[self._place : end] != said[len(said) - len(new) :]:
            return False
        self._same = self._same + len(new) if self._text.tokens[self._place : end] == new else 0
        self._place = end
        return True

    def _seek(self) -> None:
        """The newest place of those where the most tokens agree."""
        last, longest, self._agreeing = self._answer.alike[-LONGEST:], LEAST - 1, 0
        row = tuple(last[-LEAST:])
        for text in (self._answer, self._prompt, *self._earlier.of(self._name)):
            for place in text.behind(row, LATEST):
                if place < len(text.tokens) and (found := text.agreeing(place, last, len(last), LONGEST, longest)):
                    self._text, self._place, self._agreeing = text, place, found
                    longest = found
            if longest == LONGEST:
                break
        before = self._text.tokens[self._place - longest : self._place]
        self._same = longest if before == self._answer.tokens[-longest:] else 0
