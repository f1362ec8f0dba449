"""Penalties on tokens that a sequence holds already, and n-grams that it may not say twice.

They need the token of the step before, which the host does not know yet when it launches the next step. So the tokens
of the sequences that ask for penalties stand on the device, a line each, and every step appends its own to them. The
host writes a line only when a sequence begins, or comes back after steps without it and its line is gone: then it knows
all its tokens. (It goes where others need it, and where the last token may not have counted, as by a form.) Of a draft
the rows share their sequence's line, each up to its own place, and the step appends what turns out to be right.

Semantics are those of transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor and of vLLM's
presence and frequency penalties. A picture is one token that equals no other.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from tessera.engine.sequence import Sequence, with_marks
from tessera.kernels.operands import PenaltyLines
from tessera.kernels.transfer import Staging, to_device
from tessera.kernels.tuning import layer_kernels

_LEAST_WIDTH = 256
_SMALLEST = 1e-30  # of repetition penalties; below it logits would overflow
_NONE = -2  # in the place of a draft's token where there is none
_SLOT, _LENGTH, _DRAFTED, _COUNTS, _FOLLOWING, _NUMBERS = range(1, 7)  # of PenaltyLines' rows


class _Line(NamedTuple):
    """Which line a sequence has, and how many of its tokens are its prompt's. ``stays``: where it sits a step out, what
    stands there is still what it has said. ``uncounted``: the sequence's when the line was written."""

    slot: int
    prompt: int
    stays: bool
    uncounted: int


class Histories:
    """The tokens of up to ``max_sequences`` sequences on ``device``, 8 bytes a token of the longest.

    Nothing is allocated before somebody asks for penalties, or graphs are recorded.
    """

    def __init__(self, max_sequences: int, device: torch.device) -> None:
        self.device = device
        self._nobody = max_sequences  # one line more
        tokens = torch.zeros((max_sequences + 1, 0), dtype=torch.int32, device=device)
        facts = torch.zeros((2, max_sequences + 1), dtype=torch.int64, device=device)
        amounts = torch.zeros((3, max_sequences + 1), dtype=torch.float32, device=device)
        self.lines = PenaltyLines(tokens, torch.zeros_like(tokens), facts, amounts)
        self._static = torch.zeros((_NUMBERS, 0), dtype=torch.int64, device=device)
        self._staging: Staging  # in front of these, once there are any
        self._free = list(range(max_sequences))
        self._held: dict[int, _Line] = {}  # by request number; the one idle for longest first
        self._penalties: Penalties | None = None
        self._longest = 0  # how many tokens one of its rows knows

    def reserve(self, rows: int, width: int) -> None:
        """For CUDA graphs: up to this many rows, and lines of up to ``width`` tokens, stay where they are."""
        self._lengthen(width)
        self._static = torch.zeros((_NUMBERS, rows), dtype=torch.int64, device=self.device)
        self._staging = Staging(self._static.view(-1))

    def of_size(self, size: int) -> Penalties:
        """Those of whatever step was selected last that runs as a graph of this size."""
        return Penalties(self, self._static[:, :size])

    def select(self, sequences: SequenceType[Sequence], go_on: bool = False) -> Penalties | None:
        """The penalties of a step that samples tokens for these; None when none asks for any.

        It must be called for every step, in order. ``go_on``: whether the step before sampled for the same sequences in
        the same order, and neither verifies drafts: then the device knows all that there is to know.
        """
        wrong = [  # what a step chose, and did not count, stands there, and lengthened the echoes
            each.request.number
            for each in (sequences if self._held else ())
            if (line := self._held.get(each.request.number)) is not None and line.uncounted != each.uncounted
        ]
        self._free += [self._held.pop(number).slot for number in wrong]
        if wrong or not go_on:
            self._penalties = self._begin(sequences)
        elif self._penalties is not None:
            self._longest += 1
            self._widen(self._longest + 1)
        return self._penalties

    def _begin(self, sequences: SequenceType[Sequence]) -> Penalties | None:
        asking = {each.request.number: each for each in sequences if each.request.sampling.penalized}
        new = [each for number, each in asking.items() if number not in self._held]
        held, lacking = dict[int, _Line](), len(new) - len(self._free)
        for place, number in enumerate([number for number in self._held if number not in asking]):
            idle = self._held[number]
            if idle.stays and place >= lacking:
                held[number] = idle
            else:
                self._free.append(idle.slot)
        self._held = held | {number: self._held[number] for number in asking if number in self._held}
        if new:
            self._write(new)
        if not asking:
            return None
        numbers, place = self._rows(sequences)
        count = numbers.shape[1]
        self._longest = int(numbers[_LENGTH].max())
        self._widen(self._longest + 1)
        if place > self._static.shape[1]:
            return Penalties(self, to_device(numbers, self.device))
        filled = self._staging.front().reshape(self._static.shape)
        filled[:, :count], filled[:, count:] = numbers, 0
        filled[_SLOT, count:] = self._nobody
        self._staging.send(filled.size)
        return self.of_size(count)

    def _rows(self, sequences: SequenceType[Sequence]) -> tuple[np.ndarray, int]:
        """PenaltyLines' rows, int64 [_NUMBERS, r], and how many the step has in all."""
        place, asking, following = 0, list[tuple[int, int, int, int]](), list[int]()
        for sequence in sequences:
            count = 1 + len(sequence.draft)
            if (line := self._held.get(sequence.request.number)) is not None:
                asking.append((place, line.slot, line.prompt + sequence.place, count))
                following += (*sequence.draft, _NONE)
            place += count
        first, slot, length, counts = np.array(asking).T
        owner = np.arange(len(asking)).repeat(counts)
        drafted = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
        rows = first[owner] + drafted, slot[owner], length[owner] + drafted, drafted, np.ones_like(owner), following
        return np.array(rows), place

    def _widen(self, width: int) -> None:
        if width > self.lines.tokens.shape[1]:
            assert not self._static.shape[1], "a graph reads lines that are too short"
            self._lengthen(max(_LEAST_WIDTH, 1 << (width - 1).bit_length()))

    def _lengthen(self, width: int) -> None:
        more = (0, width - self.lines.tokens.shape[1])
        tokens, echoes, *asked = self.lines
        self.lines = PenaltyLines(pad(tokens, more), pad(echoes, more), *asked)

    def _write(self, sequences: SequenceType[Sequence]) -> None:
        histories = [history(sequence) for sequence in sequences]
        width = max(map(len, histories)) + 1
        written = np.zeros((2, len(sequences), width), np.int32)
        slots, facts, amounts = [], [], []
        for number, (sequence, tokens) in enumerate(zip(sequences, histories)):
            asked, said = sequence.request.sampling, len(sequence.outputs)
            assert said == sequence.place, "a token in flight that the step before did not sample"
            stays = not (sequence.rewinds or asked.constraint)
            line = _Line(self._free.pop(), len(tokens) - said, stays, sequence.uncounted)
            self._held[sequence.request.number] = line
            slots.append(line.slot)
            facts.append((line.prompt, asked.no_repeat_ngram_size))
            amounts.append((max(asked.repetition_penalty, _SMALLEST), asked.frequency_penalty, asked.presence_penalty))
            written[0, number, : len(tokens)] = tokens
            if asked.no_repeat_ngram_size > 1:  # else its echoes do not matter
                written[1, number, : len(tokens)] = echoes(tokens)
        self._widen(width)
        where, (tokens, matches) = to_device(np.array(slots), self.device), to_device(written, self.device)
        self.lines.tokens[where, :width], self.lines.echoes[where, :width] = tokens, matches
        self.lines.facts[:, where] = to_device(np.array(facts).T, self.device)
        self.lines.amounts[:, where] = to_device(np.array(amounts, np.float32).T, self.device)


class Penalties:
    """One step's: :meth:`applied` before its tokens are chosen, :meth:`append` afterwards; then they are those of the
    next step, if the same sequences go on and nothing was drafted."""

    def __init__(self, histories: Histories, rows: torch.Tensor) -> None:
        """``rows``: see :class:`PenaltyLines`; those of a sequence stand behind each other."""
        self._histories, self._rows = histories, rows
        self._kernels = layer_kernels(histories.device.type)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """logits of any float dtype [m, vocabulary] -> float32, changed for the rows that ask for it."""
        rows, lines = self._rows, self._histories.lines
        lines.tokens[rows[_SLOT], rows[_LENGTH]] = rows[_FOLLOWING].int()  # where nothing is drafted, nobody reads it
        return self._kernels.penalized(logits, lines, rows)

    def append(self, chosen: torch.Tensor) -> None:
        """``chosen`` int64 [m]: the step's tokens; where a draft was, those that it was right about, and the next."""
        self._kernels.append_tokens(self._histories.lines, self._rows, chosen)
        self._rows[_LENGTH].add_(self._rows[_COUNTS])


def history(sequence: Sequence) -> np.ndarray:
    """The known tokens of prompt and answer, int32; the rows of the n-th picture are one entry, -n."""
    prompt = with_marks(sequence.ids[: sequence.prompt_length], sequence.request.spans, count(-1, -1))
    return np.concatenate([prompt.astype(np.int32), np.array(sequence.outputs, np.int32)])


def echoes(tokens: np.ndarray) -> list[int]:
    """For each distance 0..n-1: how many of the last of n tokens equal those so far before them, one by one; 0 at 0."""
    # The Z-function of the tokens in reverse, which takes no longer however much they repeat.
    line = tokens[::-1].tolist()
    n = len(line)
    lengths = [0] * n
    left = right = 0
    for start in range(1, n):
        length = min(right - start, lengths[start - left]) if start < right else 0
        while start + length < n and line[length] == line[start + length]:
            length += 1
        lengths[start] = length
        if start + length > right:
            left, right = start, start + length
    return lengths
