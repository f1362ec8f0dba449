"""Constrained answers: which tokens may come next where an answer must match a regular expression or a JSON schema."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tessera import grammar
from tessera.engine.labels import label_token_ids
from tessera.errors import InvalidRequest
from tessera.sampling import SamplingParameters

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from tessera.family.tokenizer import Tokenizer

MOST_COMPILED = 16
# Matchers of one compiled grammar share its lexer: what one finds out is quick for the others, but the memory and the
# limits of the library count for all of them together.
MOST_COPIES = 32


class Matcher:
    """Follows one answer. ``mask``: the tokens that may come next, uint8 [ceil(vocabulary / 8)], the lowest bit first.

    A stop token may come wherever the answer may end.
    """

    def __init__(self, matcher: LLMatcher, ends: np.ndarray, end: int) -> None:
        """``ends``: the mask of all stop tokens; ``end``: the one that llguidance knows."""
        self._matcher = matcher
        self._ends = ends
        self._end = end
        self._failures: list[str] = []  # of all copies
        self._copies = 0
        self.error: str | None = None
        self.mask = self._compute()

    @property
    def worn(self) -> bool:
        """Whether there should be no more copies, lest what others wrote ends their answers."""
        return self._copies >= MOST_COPIES or bool(self._failures)

    def copy(self) -> Matcher:
        """One that goes its own way from here."""
        self._copies += 1
        copy = object.__new__(Matcher)
        copy.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy())
        return copy

    def advance(self, token: int) -> None:
        """Takes a token of the answer that is no stop token. Where nothing can follow it, ``error`` says why."""
        self._matcher.consume_token(token)
        self.mask = self._compute()

    def going_on(self) -> np.ndarray:
        """``mask`` without the stop tokens, unless nothing else is in it."""
        others = self.mask & ~self._ends
        return others if others.any() else self.mask

    def without(self, tokens: np.ndarray) -> None:
        """Takes ``tokens``, a mask, out of ``mask``, before the first token."""
        self.mask = self.mask & ~tokens

    def _compute(self) -> np.ndarray:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._ends)].copy()
        may_end = mask[self._end // 8] >> self._end % 8 & 1 and self._matcher.is_accepting()
        mask = mask | self._ends if may_end else mask & ~self._ends
        self.error = grammar.failure(self._matcher)
        if self.error is None and not mask.any():
            self.error = grammar.NOTHING_FOLLOWS
        if self.error is not None:
            self._failures.append(self.error)
        return mask


class Constraints:
    """Compiles what answers must match for one vocabulary, each text now and then; any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        """``vocab_size``: the model's; ``stop_ids`` are smaller."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: dict[tuple[str, object], Matcher] = {}  # the one used last at the end

    def matcher(self, parameters: SamplingParameters) -> Matcher:
        """At the beginning of an answer. Raises InvalidRequest where none could be constrained as asked.

        A text that is new takes milliseconds: not for the thread that steps.
        """
        name = parameters.constraint
        assert name is not None, "nothing is constrained"
        if not self._stop_ids:
            raise InvalidRequest(
                f"{name} needs a checkpoint that names the token that ends an answer; this one does not"
            )
        self.read_vocabulary()
        with self._lock:
            asked = name, getattr(parameters, name)
            compiled = self._compiled.pop(asked, None)
            if compiled is None or compiled.worn:
                compiled = self._compile(parameters)
            self._compiled[asked] = compiled
            if len(self._compiled) > MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return compiled.copy()

    def read_vocabulary(self) -> None:
        """Takes up to three seconds for 150,000 tokens, and no other thread runs meanwhile: best before any request."""
        with self._lock:
            if self._vocabulary is None and self._stop_ids:
                self._vocabulary = grammar.tokenizer(self._spelling())

    def _compile(self, parameters: SamplingParameters) -> Matcher:
        assert self._vocabulary is not None
        compiled = grammar.compiled(parameters, self._vocabulary)
        matcher = Matcher(compiled, self._mask(self._stop_ids), min(self._stop_ids))
        if self._tokenizer.strips_space:
            matcher.without(self._spaced)
        if matcher.error is not None or not matcher.mask.any():
            reason = matcher.error or "it begins with a space, which this checkpoint's tokenizer takes off an answer"
            raise grammar.refusal(parameters.constraint or "", reason)
        return matcher

    def _spelling(self) -> grammar.Spelling:
        encode = partial(label_token_ids, encode=partial(self._tokenizer.encode, special=False))
        tokens = [self._spelled(token) for token in range(self._vocab_size)]
        self._spaced = self._mask([token for token, spelled in enumerate(tokens) if spelled.startswith(b" ")])
        return grammar.Spelling(tokens, min(self._stop_ids), encode)

    def _spelled(self, token: int) -> bytes:
        """Nothing for tokens that are no text."""
        if token in self._stop_ids or token in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token)

    def _mask(self, tokens: Collection[int]) -> np.ndarray:
        allowed = np.zeros(-(-self._vocab_size // 8) * 8, np.uint8)
        allowed[list(tokens)] = 1
        return np.packbits(allowed, bitorder="little")
