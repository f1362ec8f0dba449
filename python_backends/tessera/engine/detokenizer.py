"""Token ids -> text, piece by piece: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from typing import TYPE_CHECKING

from tessera.engine.request import SamplingParameters

if TYPE_CHECKING:
    from tessera.family.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer. All its deltas together are the decoded answer, cut at a stop string."""

    def __init__(self, tokenizer: Tokenizer, parameters: SamplingParameters) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._longest_stop = max(map(len, parameters.stop), default=0)
        self._stream = tokenizer.stream(parameters.skip_special_tokens)
        self._tokens = 0
        self._held = ""
        self._exempt = 0  # characters of it that min_tokens covers

    def push(self, tokens: SequenceType[int]) -> tuple[str, int]:
        """Takes the next tokens; returns the text that is certain now, and how many tokens were taken.

        Those after the one that completes a stop string are not: ``stopped`` is then set.
        """
        if not self._parameters.stop:
            return self._stream.push(tokens), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            self._tokens += 1
            text += self._release(self._stream.push([token]))
            if self.stopped:
                return text, count
        return text, len(tokens)

    def flush(self) -> str:
        """The answer has ended: whatever was held back."""
        if self.stopped:
            return ""
        text = self._release(self._stream.end())
        held, self._held = self._held, ""
        return text + held

    def token_text(self, token: int) -> str:
        """A token on its own."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _release(self, fresh: str) -> str:
        if not self._parameters.stop:
            return fresh
        text = self._held + fresh
        if self._tokens <= self._parameters.min_tokens:
            self._exempt = len(text)
        # As in vLLM: a stop string counts if any of it follows the first min_tokens tokens.
        found = [
            (at, stop)
            for stop in self._parameters.stop
            if (at := text.find(stop, max(0, self._exempt - len(stop) + 1))) >= 0
        ]
        if found:
            at, stop = min(found)
            self.stopped, self._held = True, ""
            return text[: at + len(stop)] if self._parameters.include_stop_str_in_output else text[:at]
        keep = self._length_of_possible_stop(text)
        shown = len(text) - keep
        self._held, self._exempt = text[shown:], max(0, self._exempt - shown)
        return text[:shown]

    def _length_of_possible_stop(self, text: str) -> int:
        """Characters at the end of ``text`` that begin a stop string."""
        lengths = range(min(len(text), self._longest_stop - 1), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._parameters.stop)), 0)
