"""Token ids -> text, piece by piece: complete characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from typing import Protocol

from tessera.engine.request import SamplingParameters

_REPLACEMENT = "\ufffd"
_MOST_HELD = 24


class Decoder(Protocol):
    """What the engine needs of a tokenizer; ids that it does not know decode to nothing."""

    def decode(self, ids: SequenceType[int], skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, special: bool) -> list[int]: ...


class Detokenizer:
    """The text of one answer. All its deltas together are the decoded answer, cut at a stop string."""

    def __init__(self, decoder: Decoder, parameters: SamplingParameters) -> None:
        self.stopped = False
        self._decoder = decoder
        self._parameters = parameters
        self._longest_stop = max(map(len, parameters.stop), default=0)
        # Ids [window:read] are shown already and give what follows its context (such as a leading space).
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self._held = ""
        self._exempt = 0  # characters of it that min_tokens covers

    def push(self, tokens: SequenceType[int]) -> tuple[str, int]:
        """Takes the next tokens; returns the text that is certain now, and how many tokens were taken.

        Those after the one that completes a stop string are not: ``stopped`` is then set.
        """
        if not self._parameters.stop:
            self._ids += tokens
            return self._fresh_text(final=False), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            self._ids.append(token)
            text += self._release(self._fresh_text(final=False))
            if self.stopped:
                return text, count
        return text, len(tokens)

    def flush(self) -> str:
        """The answer has ended: whatever was held back."""
        if self.stopped:
            return ""
        text = self._release(self._fresh_text(final=True))
        held, self._held = self._held, ""
        return text + held

    def token_text(self, token: int) -> str:
        """A token on its own."""
        return self._decoder.decode([token], skip_special_tokens=False)

    def _fresh_text(self, final: bool) -> str:
        """Text beyond what was read, up to the last token after which no character is incomplete."""
        shown = self._decode(self._ids[self._window : self._read])
        # Tokens that never make a character must not be held, and decoded again, forever.
        patient = not final and len(self._ids) - self._read < _MOST_HELD
        for end in range(len(self._ids), self._read, -1):
            text = self._decode(self._ids[self._window : end])
            if not patient or (len(text) > len(shown) and not text.endswith(_REPLACEMENT)):
                self._window, self._read = self._read, end
                return text[len(shown) :]
        return ""

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, self._parameters.skip_special_tokens) if ids else ""

    def _release(self, fresh: str) -> str:
        if not self._parameters.stop:
            return fresh
        text = self._held + fresh
        if len(self._ids) <= self._parameters.min_tokens:
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
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._parameters.stop):
                return length
        return 0
