"""Penalties on tokens that a sequence holds already, and n-grams that it may not say twice.

They need the token of the step before, which the host does not know yet when it launches the next step. So the tokens
of the sequences that ask for penalties stand on the device, a line each, and every step appends its own to them. The
host writes a line only when a sequence begins, or comes back after steps without it: then it knows all its tokens.

Semantics are those of transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor and of vLLM's
presence and frequency penalties. A picture is one token that equals no other.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad

from tessera.engine.request import SamplingParameters
from tessera.engine.sequence import Sequence
from tessera.engine.transfer import to_device

_LEAST_WIDTH = 256
_SMALLEST = 1e-30  # of repetition penalties; below it logits would overflow


@dataclass(frozen=True)
class _Line:
    """Where a sequence's tokens stand, how many are its prompt's, and how many of its answer's the next step finds."""

    slot: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        return self.prompt + self.answer


class Histories:
    """The tokens of up to ``max_sequences`` sequences on ``device``, 8 bytes a token of the longest.

    Nothing is allocated before somebody asks for penalties.
    """

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self.device = device
        # int32 [max_sequences, width]; at a place q of a line of n tokens: the token, and how many tokens before q
        # equal the line's last ones. Places from n on mean nothing.
        self.tokens = torch.zeros((max_sequences, 0), dtype=torch.int32, device=device)
        self.echoes = torch.zeros_like(self.tokens)
        self._lines: dict[int, _Line] = {}  # by id(sequence), those of the step before

    def select(self, sequences: SequenceType[Sequence]) -> Penalties | None:
        """The penalties of a step that samples a token for each of these; None when none asks for any.

        It must be called for every step that samples, in order.
        """
        before, self._lines = self._lines, {}
        asking = [place for place, sequence in enumerate(sequences) if sequence.request.sampling.penalized]
        if not asking:
            return None
        lines: dict[int, _Line] = {}  # by place
        for place in asking:
            line = before.get(id(sequences[place]))
            if line is not None and line.answer == sequences[place].place:
                lines[place] = line
        free = sorted(set(range(len(self.tokens))) - {line.slot for line in lines.values()}, reverse=True)
        new = {place: history(sequences[place]) for place in asking if place not in lines}
        for place, tokens in new.items():
            answer = len(sequences[place].outputs)
            assert answer == sequences[place].place, "a token in flight that the step before did not sample"
            lines[place] = _Line(free.pop(), len(tokens) - answer, answer)
        self._widen(max(line.length for line in lines.values()) + 1)
        if new:
            ngrams = [sequences[place].request.sampling.no_repeat_ngram_size > 1 for place in new]
            self._write([lines[place].slot for place in new], list(new.values()), ngrams)
        for place, line in lines.items():
            self._lines[id(sequences[place])] = replace(line, answer=line.answer + 1)
        asked = [sequences[place].request.sampling for place in asking]
        return Penalties(self, asking, [lines[place] for place in asking], asked)

    def forget(self) -> None:
        """For a step that samples without penalties."""
        self._lines = {}

    def _widen(self, width: int) -> None:
        more = width - self.tokens.shape[1]
        if more > 0:
            more = max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) - self.tokens.shape[1]
            self.tokens, self.echoes = pad(self.tokens, (0, more)), pad(self.echoes, (0, more))

    def _write(self, slots: list[int], histories: list[np.ndarray], ngrams: list[bool]) -> None:
        """``ngrams``: whose echoes matter."""
        width = max(map(len, histories))
        lines = np.zeros((2, len(slots), width), np.int32)
        for number, tokens in enumerate(histories):
            lines[0, number, : len(tokens)] = tokens
            if ngrams[number]:
                lines[1, number, : len(tokens)] = echoes(tokens)
        where, (tokens, matches) = to_device(np.array(slots), self.device), to_device(lines, self.device)
        self.tokens[where, :width] = tokens
        self.echoes[where, :width] = matches


class Penalties:
    """One step's: :meth:`applied` before its tokens are chosen, :meth:`append` afterwards."""

    def __init__(
        self, histories: Histories, places: list[int], lines: list[_Line], parameters: list[SamplingParameters]
    ) -> None:
        """``places``: which of the step's rows ask for penalties; ``lines`` and ``parameters`` are these ones'."""
        device = histories.device
        numbers = np.array(
            [
                (place, line.slot, line.length, line.prompt, asked.no_repeat_ngram_size)
                for place, line, asked in zip(places, lines, parameters)
            ],
            np.int64,
        )
        amounts = np.array(
            [
                (max(asked.repetition_penalty, _SMALLEST), asked.frequency_penalty, asked.presence_penalty)
                for asked in parameters
            ],
            np.float32,
        )
        self._histories = histories
        self._width = max(line.length for line in lines)
        self._counts = any(asked.frequency_penalty or asked.presence_penalty for asked in parameters)
        self._ngrams = any(asked.no_repeat_ngram_size for asked in parameters)
        self._places, self._slots, self._lengths, self._prompts, self._sizes = to_device(numbers.T, device)
        self._repetition, self._frequency, self._presence = to_device(amounts.T, device)[:, :, None]
        self._tokens = histories.tokens[self._slots, : self._width].long()

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """logits of any float dtype [m, vocabulary] -> float32, changed for the rows that ask for it."""
        logits = logits.float()
        vocabulary = logits.shape[1]
        # One column more than there are tokens: what is no token points there.
        scores = pad(logits[self._places], (0, 1))
        tokens = self._tokens
        at = torch.arange(self._width, device=logits.device)
        known = (tokens >= 0) & (at < self._lengths[:, None])
        index = torch.where(known, tokens, vocabulary)
        values = scores.gather(1, index)
        values = torch.where(values < 0, values * self._repetition, values / self._repetition)
        if self._counts:
            answered = torch.where(known & (at >= self._prompts[:, None]), tokens, vocabulary)
            counts = torch.zeros_like(scores, dtype=torch.int32)
            counts.scatter_add_(1, answered, torch.ones_like(answered, dtype=torch.int32))
            times = counts.gather(1, index)
            values -= self._frequency * times
            values -= self._presence * (times > 0)
        scores.scatter_(1, index, values)  # a token's places all hold the same value
        if self._ngrams:
            sizes = self._sizes[:, None]
            echoes = self._histories.echoes[self._slots, : self._width]
            repeats = known & (sizes > 0) & (echoes >= sizes - 1)
            scores.scatter_(1, torch.where(repeats, tokens, vocabulary), float("-inf"))
        logits[self._places] = scores[:, :vocabulary]
        return logits

    def append(self, chosen: torch.Tensor) -> None:
        """``chosen`` int64 [m]: the step's tokens."""
        histories, width = self._histories, self._width
        chosen = chosen[self._places]
        if self._ngrams:
            longer = histories.echoes[self._slots, :width] + 1
            same = self._tokens == chosen[:, None]
            histories.echoes[self._slots, 1 : width + 1] = longer.where(same, 0)
        histories.tokens[self._slots, self._lengths] = chosen.int()


def history(sequence: Sequence) -> np.ndarray:
    """The known tokens of prompt and answer, int32; the rows of the n-th picture are one entry, -n."""
    length = sequence.prompt_length
    prompt = sequence.ids[:length].astype(np.int32)
    kept = np.ones(length, bool)
    for number, (start, rows) in enumerate(np.asarray(sequence.request.spans).reshape(-1, 2), 1):
        prompt[start] = -number
        kept[start + 1 : start + rows] = False
    return np.concatenate([prompt[kept], np.array(sequence.outputs, np.int32)])


def echoes(tokens: np.ndarray) -> np.ndarray:
    """int32 [n], for each place of n tokens: how many tokens before it equal the last ones, one by one."""
    # The Z-function of the tokens in reverse, which takes no longer however much they repeat.
    line = tokens[::-1].tolist()
    n = len(line)
    found = np.zeros(n, np.int32)
    lengths = [0] * n
    left = right = 0
    for start in range(1, n):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < n and line[length] == line[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
        found[n - start] = length
    return found
