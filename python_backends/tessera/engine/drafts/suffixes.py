"""What followed the answer's last tokens where they occurred before: in its prompt, and in earlier answers.

Earlier answers are shared by name alone: one without a name leaves nothing behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from tessera.engine.drafts.alignment import LONGEST, Alignment, SuffixAutomaton
from tessera.engine.drafts.text import PIECE

PROMPT_TOKENS = 2048  # the last ones of a prompt that are read
LEAST = 4  # tokens that must have occurred
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
    the one that was not used for longest goes first. By default 131,072 tokens, in 50 MB."""

    def __init__(self, names: int = 16, tokens: int = 4096) -> None:
        self._names, self._tokens = names, tokens
        self._of: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def of(self, name: str) -> Sequence[SuffixAutomaton]:
        """The newest first."""
        if name not in self._of:
            return ()
        self._of.move_to_end(name)
        return self._of[name]

    def add(self, name: str, answer: Sequence[int]) -> None:
        """Keeps the beginning of an answer that is as long as all that is kept."""
        kept = self._of.setdefault(name, [SuffixAutomaton()])
        self._of.move_to_end(name)
        if len(self._of) > self._names:
            self._of.popitem(last=False)
        if len(kept[0].tokens) + len(answer) > self._tokens and kept[0].tokens:
            kept[:] = [SuffixAutomaton(), kept[0]]
        kept[0].extend([*answer[: self._tokens], BETWEEN])


class Suffixes:
    """Proposes for one answer, once its last four tokens or more occurred before, what followed where the most did, and
    no more tokens than occurred: in answers without boilerplate, longer drafts are nearly all wrong.

    ``prompt``: as :func:`read_tokens` has it. ``name``: of the earlier answers.
    """

    prior = 0.4

    def __init__(self, prompt: Sequence[int], earlier: EarlierAnswers, name: str) -> None:
        self._unread = list(prompt)
        self._prompt = SuffixAutomaton()
        self._earlier, self._name = earlier, name
        self._alignments: dict[SuffixAutomaton, Alignment] = {}
        self._read = 0  # of the answer's tokens

    def propose(self, outputs: Sequence[int], most: int) -> list[int]:
        """As :meth:`tessera.engine.drafts.text.TextDraft.propose`."""
        if self._unread:
            self._prompt.extend(self._unread[:PIECE])
            del self._unread[:PIECE]
        recent = max(0, len(outputs) - LONGEST)  # where to begin in a text that is new
        known = self._alignments if self._read >= recent else {}
        texts = (self._prompt, *self._earlier.of(self._name))
        self._alignments = {text: known.get(text) or Alignment(text) for text in texts}
        for text, alignment in self._alignments.items():
            for at in range(self._read if text in known else recent, len(outputs)):
                alignment.take(outputs, at)
        self._read = len(outputs)
        best = max(self._alignments.values(), key=lambda alignment: alignment.length)
        if best.length < LEAST or best.place is None:
            return []
        begin = best.place + 1
        return list(takewhile(BETWEEN.__ne__, best.automaton.tokens[begin : begin + min(most, best.length)]))
