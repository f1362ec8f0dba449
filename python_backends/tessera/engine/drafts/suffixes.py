"""What followed the answer's last tokens where they occurred before: in its prompt, and in earlier answers.

Earlier answers are shared by name alone: one without a name leaves nothing behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from tessera.engine.drafts.occurrences import Occurrences

PROMPT_TOKENS = 2048  # the last ones of a prompt that are read
PIECE = 256  # tokens of it read at a call: no step waits for a long prompt
LEAST = 4  # tokens that must have occurred
LONGEST = 16  # by which places are told apart
LATEST = 8  # places of a text that are looked at
BETWEEN = -1
"""In a token's place: what stands before it is not followed by what comes after it."""


def read_tokens(input_ids: np.ndarray, spans: np.ndarray) -> list[int]:
    """A prompt's tokens with BETWEEN where each picture stands; the arguments are as in Request."""
    tokens, kept = np.array(input_ids), np.ones(len(input_ids), bool)
    for start, length in np.asarray(spans).reshape(-1, 2):
        tokens[start], kept[start + 1 : start + length] = BETWEEN, False
    return tokens[kept][-PROMPT_TOKENS:].tolist()


class EarlierAnswers:
    """The last answers by name: of each name between ``tokens`` and twice as many tokens, of at most ``names`` names;
    the one that was not used for longest goes first. By default 131,072 tokens, in 26 MB."""

    def __init__(self, names: int = 16, tokens: int = 4096) -> None:
        self._names, self._tokens = names, tokens
        self._of: OrderedDict[str, list[Occurrences]] = OrderedDict()

    def of(self, name: str) -> Sequence[Occurrences]:
        """The newest first."""
        if (kept := self._of.get(name)) is None:
            return ()
        self._of.move_to_end(name)
        return kept

    def add(self, name: str, answer: Sequence[int]) -> None:
        """Keeps the beginning of an answer that is as long as all that is kept."""
        kept = self._of.setdefault(name, [Occurrences(LEAST)])
        self._of.move_to_end(name)
        if len(self._of) > self._names:
            self._of.popitem(last=False)
        if len(kept[0].tokens) + len(answer) > self._tokens and kept[0].tokens:
            kept[:] = [Occurrences(LEAST), kept[0]]
        kept[0].extend([*answer[: self._tokens], BETWEEN])


class Suffixes:
    """Proposes for one answer, once its last four tokens or more occurred before, what followed where the most did, and
    no more tokens than occurred: in answers without boilerplate, longer drafts are nearly all wrong.

    ``prompt``: as :func:`read_tokens` has it. ``name``: of the earlier answers.
    """

    prior = 0.4

    def __init__(self, prompt: Sequence[int], earlier: EarlierAnswers, name: str) -> None:
        self._unread = list(prompt)
        self._prompt = Occurrences(LEAST)
        self._earlier, self._name = earlier, name

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """As :meth:`tessera.engine.drafts.drafter.Drafter.propose`."""
        if self._unread:
            self._prompt.extend(self._unread[:PIECE])
            del self._unread[:PIECE]
        last, longest = tuple(outputs[-LEAST:]), 0
        found: list[int] = []
        for text in (self._prompt, *self._earlier.of(self._name)):
            for place in text.behind.get(last, ())[-LATEST:]:
                agreeing = text.agreeing(place, outputs, len(outputs), LONGEST)
                if agreeing > longest:
                    longest, found = agreeing, text.tokens[place : place + min(most, agreeing)]
        return list(takewhile(BETWEEN.__ne__, found)) if found else found
