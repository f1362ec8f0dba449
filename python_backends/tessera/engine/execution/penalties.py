"""Penalties on tokens that a sequence holds already, and n-grams that it may not say twice.

They need the token of the step before, which the host does not know yet when it launches the next step. So the tokens
of the sequences that ask for penalties stand on the device, a line each, and every step appends its own to them. The
host writes a line only when a sequence begins, or comes back after steps without it: then it knows all its tokens.

Semantics are those of transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor and of vLLM's
presence and frequency penalties. A picture is one token that equals no other.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

import numpy as np
import torch
from torch.nn.functional import pad

from tessera.engine.request import SamplingParameters
from tessera.engine.sequence import Sequence
from tessera.engine.transfer import to_device

_LEAST_WIDTH = 256
_SPARE = 4
_SMALLEST = 1e-30  # of repetition penalties; below it logits would overflow


# A line's numbers: where the sequence's tokens stand, how many are its prompt's, how many of its answer's the next step
# finds, and the size of n-grams that it may not repeat.
_SLOT, _PROMPT, _ANSWER, _SIZE = range(4)


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
        self._before: dict[int, int] = {}  # by id(sequence), the lines of the step before
        self._lines = np.zeros((1, 4), np.int64)
        self._amounts = np.zeros((1, 3), np.float32)  # repetition, frequency, presence

    def select(self, sequences: SequenceType[Sequence]) -> Penalties | None:
        """The penalties of a step that samples a token for each of these; None when none asks for any.

        It must be called for every step that samples, in order.
        """
        before, self._before = self._before, {}
        asking = [place for place, sequence in enumerate(sequences) if sequence.request.sampling.penalized]
        if not asking:
            return None
        asked = [sequences[place] for place in asking]
        found = np.array([before.get(id(sequence), -1) for sequence in asked])
        places = np.array([sequence.place for sequence in asked])
        lines, amounts = self._lines[found], self._amounts[found]
        begins = (found < 0) | (lines[:, _ANSWER] != places)
        histories = [history(asked[number]) for number in np.flatnonzero(begins)]
        if histories:
            new = [asked[number] for number in np.flatnonzero(begins)]
            answers = [len(sequence.outputs) for sequence in new]
            assert answers == places[begins].tolist(), "a token in flight that the step before did not sample"
            prompts = [len(tokens) - answer for tokens, answer in zip(histories, answers)]
            free = np.setdiff1d(np.arange(len(self.tokens)), lines[~begins, _SLOT])[: len(new)]
            sizes = [sequence.request.sampling.no_repeat_ngram_size for sequence in new]
            lines[begins] = np.stack([free, prompts, answers, sizes], axis=1)
            amounts[begins] = [_amounts(sequence.request.sampling) for sequence in new]
        self._widen(int((lines[:, _PROMPT] + places).max()) + 1)
        if histories:
            self._write(lines[begins], histories)
        self._before = {id(sequence): number for number, sequence in enumerate(asked)}
        self._lines, self._amounts = lines + np.eye(4, dtype=np.int64)[_ANSWER], amounts
        return Penalties(self, asking, lines, amounts)

    def forget(self) -> None:
        """For a step that samples without penalties."""
        self._before = {}

    def _widen(self, width: int) -> None:
        more = width - self.tokens.shape[1]
        if more > 0:
            more = max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) - self.tokens.shape[1]
            self.tokens, self.echoes = pad(self.tokens, (0, more)), pad(self.echoes, (0, more))

    def _write(self, lines: np.ndarray, histories: list[np.ndarray]) -> None:
        width = max(map(len, histories))
        written = np.zeros((2, len(lines), width), np.int32)
        for number, tokens in enumerate(histories):
            written[0, number, : len(tokens)] = tokens
            if lines[number, _SIZE] > 1:  # else its echoes do not matter
                written[1, number, : len(tokens)] = echoes(tokens)
        where, (tokens, matches) = to_device(lines[:, _SLOT], self.device), to_device(written, self.device)
        self.tokens[where, :width] = tokens
        self.echoes[where, :width] = matches


class Penalties:
    """One step's: :meth:`applied` before its tokens are chosen, :meth:`append` afterwards."""

    def __init__(self, histories: Histories, places: list[int], lines: np.ndarray, amounts: np.ndarray) -> None:
        """``places``: which of the step's rows ask for penalties; ``lines`` and ``amounts`` are these ones'."""
        device = histories.device
        lengths = lines[:, _PROMPT] + lines[:, _ANSWER]
        numbers = np.stack([places, lines[:, _SLOT], lengths, lines[:, _PROMPT], lines[:, _SIZE]])
        self._histories = histories
        self._width = int(lengths.max())
        self._counts = bool(amounts[:, 1:].any())
        self._ngrams = bool(lines[:, _SIZE].any())
        self._places, self._slots, self._lengths, self._prompts, self._sizes = to_device(numbers, device)
        self._repetition, self._frequency, self._presence = to_device(amounts.T, device)[:, :, None]
        self._tokens = histories.tokens[self._slots, : self._width].long()

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """logits of any float dtype [m, vocabulary] -> float32, changed for the rows that ask for it."""
        tokens, vocabulary = self._tokens, logits.shape[1]
        everybody = len(tokens) == len(logits)
        # Columns beyond the tokens': what is no token points there. This many keep the rows aligned.
        scores = logits.new_empty((len(tokens), vocabulary + _SPARE), dtype=torch.float32)
        scores[:, :vocabulary] = logits if everybody else logits[self._places]
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
        changed = scores[:, :vocabulary]
        if everybody:  # a batch's logits are large: nobody else's are copied, nor these once more
            return changed
        logits = logits.float()
        logits[self._places] = changed
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


def _amounts(asked: SamplingParameters) -> tuple[float, float, float]:
    return max(asked.repetition_penalty, _SMALLEST), asked.frequency_penalty, asked.presence_penalty


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
