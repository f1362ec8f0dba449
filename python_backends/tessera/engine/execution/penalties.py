"""Penalties on tokens that a sequence holds already, and n-grams that it may not say twice.

They need the token of the step before, which the host does not know yet when it launches the next step. So the tokens
of the sequences that ask for penalties stand on the device, a line each, and every step appends its own to them. The
host writes a line only when a sequence begins, or comes back after steps without it: then it knows all its tokens. Of
a draft the rows share their sequence's line, each up to its own place, and the step appends what turns out to be right.

Semantics are those of transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor and of vLLM's
presence and frequency penalties. A picture is one token that equals no other.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from tessera.engine.sequence import SamplingParameters, Sequence
from tessera.kernels.operands import PenaltyRows
from tessera.kernels.transfer import to_device
from tessera.kernels.tuning import layer_kernels

_LEAST_WIDTH = 256
_SMALLEST = 1e-30  # of repetition penalties; below it logits would overflow


# A line's numbers: where the sequence's tokens stand, how many are its prompt's, how many of its answer's the next step
# finds, and the size of n-grams that it may not repeat.
_SLOT, _PROMPT, _ANSWER, _SIZE = range(4)
_AS_KNOWN = -1  # as many of the answer as the host knows by the next step: of a draft so much was right


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
        """The penalties of a step that samples tokens for these; None when none asks for any.

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
        # One that has said nothing is new, though it may go by the id of one that is gone.
        as_known = (lines[:, _ANSWER] == _AS_KNOWN) & (places > 0)
        lines[as_known, _ANSWER] = places[as_known]
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
        counts = np.array([1 + len(sequence.draft) for sequence in sequences])
        rows = _Rows.of(asking, counts, lines, amounts, [token for sequence in asked for token in sequence.draft])
        self._widen(int(rows.lengths.max()) + 1)
        if histories:
            self._write(lines[begins], histories)
        self._before = {id(sequence): number for number, sequence in enumerate(asked)}
        self._lines, self._amounts = lines + np.eye(4, dtype=np.int64)[_ANSWER], amounts
        self._lines[counts[asking] > 1, _ANSWER] = _AS_KNOWN
        return Penalties(self, rows)

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


class _Rows(NamedTuple):
    """A step's rows that ask for penalties, int64 [r], those of one sequence behind each other.

    ``places``: where they stand among all the step's rows; ``lines`` [r, 4] with the answers as long as each row finds
    them, ``amounts`` float32 [r, 3]; ``drafted``: how many tokens of its sequence's draft a row stands behind;
    ``following``: the draft's token behind a row, -2 where there is none.
    """

    places: np.ndarray
    lines: np.ndarray
    amounts: np.ndarray
    drafted: np.ndarray
    following: np.ndarray

    @classmethod
    def of(
        cls, asking: list[int], counts: np.ndarray, lines: np.ndarray, amounts: np.ndarray, drafts: list[int]
    ) -> _Rows:
        """``asking``: which sequences ask; ``counts`` int64: how many rows each of all has."""
        count, first = counts[asking], (counts.cumsum() - counts)[asking]
        owner = np.repeat(np.arange(len(asking)), count)
        drafted = np.arange(len(owner)) - (count.cumsum() - count)[owner]
        following = np.full(len(owner), -2)
        following[drafted < (count - 1)[owner]] = drafts
        lines = lines[owner]
        lines[:, _ANSWER] += drafted
        return cls(first[owner] + drafted, lines, amounts[owner], drafted, following)

    @property
    def lengths(self) -> np.ndarray:
        return self.lines[:, _PROMPT] + self.lines[:, _ANSWER]


class Penalties:
    """One step's: :meth:`applied` before its tokens are chosen, :meth:`append` afterwards."""

    def __init__(self, histories: Histories, rows: _Rows) -> None:
        device, lines = histories.device, rows.lines
        numbers = [rows.places, lines[:, _SLOT], rows.lengths, lines[:, _PROMPT], lines[:, _SIZE]]
        self._histories, self._rows = histories, rows
        self._kernels = layer_kernels(device.type)
        amounts = to_device(np.ascontiguousarray(rows.amounts.T), device)
        self._asked = PenaltyRows(to_device(np.stack(numbers), device), amounts, int(rows.lengths.max()))
        if rows.drafted.any():
            behind = np.flatnonzero(rows.drafted)
            written = [lines[behind, _SLOT], rows.lengths[behind] - 1, rows.following[behind - 1]]
            slots, at, drafts = to_device(np.stack(written), device)
            histories.tokens[slots, at] = drafts.int()
        self._echoes = self._echoes_of_drafts() if lines[:, _SIZE].any() else None

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """logits of any float dtype [m, vocabulary] -> float32, changed for the rows that ask for it."""
        return self._kernels.penalized(logits, self._histories.tokens, self._asked, self._echoes)

    def append(self, chosen: torch.Tensor) -> None:
        """``chosen`` int64 [m]: the step's tokens; where a draft was, those that it was right about, and the next."""
        asked, echoes = self._asked, self._echoes
        if self._rows.drafted.any():
            last = self._last_right(chosen[asked.numbers[0]])
            asked = asked._replace(numbers=asked.numbers[:, last].contiguous())
            echoes = None if echoes is None else echoes[last]
        self._kernels.append_tokens(self._histories.tokens, self._histories.echoes, asked, echoes, chosen)

    def _echoes_of_drafts(self) -> torch.Tensor:
        """int32 [r, width]: those of each row, of a line that ends where the row does."""
        slots, width, drafted = self._asked.numbers[1], self._asked.width, self._rows.drafted
        echoes = self._histories.echoes[slots, :width]
        if drafted.any():
            tokens = self._histories.tokens[slots, :width]
            for step in range(int(drafted.max())):
                at = np.minimum(self._rows.lengths - drafted + step, width - 1)
                token = tokens.gather(1, to_device(at[:, None], echoes.device))
                behind = to_device(drafted > step, echoes.device)[:, None]
                longer = (echoes + 1).where(tokens == token, 0)
                echoes = pad(longer, (1, 0))[:, :width].where(behind, echoes)
        return echoes

    def _last_right(self, chosen: torch.Tensor) -> torch.Tensor:
        """int64, a row of each sequence: the one behind all that the draft was right about. ``chosen`` int64 [r]."""
        firsts = np.flatnonzero(self._rows.drafted == 0)
        owner = to_device(np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(chosen))), chosen.device)
        first = to_device(firsts, chosen.device)
        wrong = (chosen != to_device(self._rows.following, chosen.device)).long()
        before = wrong.cumsum(0) - wrong
        right_so_far = (before == before[first][owner]).long()
        return first - 1 + torch.zeros_like(first).index_add_(0, owner, right_so_far)


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
