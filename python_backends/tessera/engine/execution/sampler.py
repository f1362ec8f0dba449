"""Chooses tokens from logits.

A sampled token comes from one uniform number, which is a hash of the request's seed and the token's place in the
answer. So a request draws the same tokens whatever else is in the batch, and again after a preemption.

Penalties on tokens that a sequence holds already, and n-grams that it may not say twice.

They need the token of the step before, which the host does not know yet when it launches the next step. So the tokens
of the sequences that ask for penalties stand on the device, a line each, and every step appends its own to them. The
host writes a line only when a sequence begins, or comes back after steps without it: then it knows all its tokens. Of
a draft the rows share their sequence's line, each up to its own place, and the step appends what turns out to be right.

Semantics are those of transformers' RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor and of vLLM's
presence and frequency penalties. A picture is one token that equals no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as SequenceType
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from tessera.engine.sequence import NOT_FINITE, Report, SampledToken, SamplingParameters, Sequence
from tessera.kernels.transfer import Moment, to_device, to_host
from tessera.kernels.tuning import layer_kernels


class SamplingRow(NamedTuple):
    """What one token needs: parameters, the seed, its place in the answer, and tokens that it may not be.

    ``children``: tokens whose log probabilities are asked for instead, where labels are scored. ``mask``: the tokens
    that it may be, uint8 [ceil(vocabulary / 8)] with the lowest bit first, or the only one; None: any.
    """

    parameters: SamplingParameters
    seed: int
    place: int
    forbidden: frozenset[int] = frozenset()
    children: tuple[int, ...] = ()
    mask: np.ndarray | int | None = None

    @classmethod
    def of(cls, sequence: Sequence, drafted: int = 0) -> SamplingRow:
        """The row of a sequence's token that is in flight, or of that behind so many tokens of its draft; while it is
        short of min_tokens it may not stop."""
        parameters = sequence.request.sampling
        place, mask = sequence.place + drafted, sequence.mask(drafted)  # which knows of min_tokens
        short = place < parameters.min_tokens and mask is None
        forbidden = sequence.stop_ids if short else frozenset()
        return cls(parameters, sequence.seed, place, forbidden, sequence.children, mask)


class SampledRows:
    """Chosen tokens, int64 ``ids`` [m], on their way to the host; nothing waits before :meth:`tokens`.

    ``started``: when the step that chose them began.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        started: Moment,
        reported: SequenceType[tuple[int, int]] = (),
        details: SequenceType[torch.Tensor] = (),
    ) -> None:
        """``reported``: rows with log probabilities, and of how many tokens besides their own. ``details``: the r
        rows' own [r], those of the others [r, most], and which these are, int64 [r, most].
        """
        self.ids = ids
        self._started = started
        self._reported = reported
        self._on_host = [to_host(tensor) for tensor in (ids, *details)]
        self._arrived = Moment(ids.device)

    def tokens(self) -> list[SampledToken]:
        """Waits until the tokens are there."""
        self._arrived.wait()
        ids, *details = (tensor.tolist() for tensor in self._on_host)
        chosen: list[SampledToken] = [(token, None) for token in ids]
        for (row, count), own, values, wanted in zip(self._reported, *details):
            chosen[row] = ids[row], Report(own, tuple(zip(wanted[:count], values[:count])))
        return chosen

    def device_ns(self) -> int:
        """From ``started`` until the tokens were there; call it after :meth:`tokens`."""
        return self._arrived.since(self._started)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary] -> the likeliest tokens, int64 [m]; NOT_FINITE for a row with any NaN
    or infinity."""
    return layer_kernels(logits.device.type).likeliest(logits)


def _spread(logits: torch.Tensor) -> torch.Tensor:
    """[m]: infinite or NaN for rows with any NaN or infinity, found in one pass."""
    lowest, highest = logits.aminmax(dim=-1)
    return highest - lowest


def _checked(tokens: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return torch.where(spread < float("inf"), tokens, NOT_FINITE)


def sample(
    logits: torch.Tensor, rows: SequenceType[SamplingRow], started: Moment, penalties: Penalties | None = None
) -> SampledRows:
    """logits of any float dtype [m, vocabulary], m rows -> m tokens, NOT_FINITE for a row with any NaN or infinity.

    In this order: log probabilities and the search for NaN, both of the logits as they are; biases; penalties; tokens
    that may not be; temperature, min_p, top_k and top_p. ``logits`` itself may be changed.
    Indices go to the device by ``to_device``: plain lists as indices would wait for the whole step.
    """
    device = logits.device
    reported = [i for i, row in enumerate(rows) if row.parameters.logprobs is not None or row.children]
    where = to_device(np.array(reported, np.int64), device)
    logprobs = logits[where].float().log_softmax(dim=-1) if reported else None
    spread = _spread(logits)  # before any token is forbidden
    biased = [(i, *pair) for i, row in enumerate(rows) for pair in row.parameters.logit_bias]
    if biased:
        logits = _biased(logits.float(), biased)
    if penalties is not None:
        logits = penalties.applied(logits)
    forbidden = [(i, token) for i, row in enumerate(rows) for token in row.forbidden]
    if forbidden:
        places = to_device(np.array(forbidden, np.int64), device)
        logits[places[:, 0], places[:, 1]] = float("-inf")
    masks = {i: row.mask for i, row in enumerate(rows) if isinstance(row.mask, np.ndarray)}
    if masks:
        _mask(logits, [*masks], np.stack([*masks.values()]))
    tokens = logits.argmax(dim=-1)
    only = {i: row.mask for i, row in enumerate(rows) if isinstance(row.mask, int)}
    drawn = [i for i, row in enumerate(rows) if row.parameters.temperature > 0 and i not in only]
    if drawn:
        for first in range(0, len(drawn), _DRAWN_AT_ONCE):
            part = drawn[first : first + _DRAWN_AT_ONCE]
            chosen = to_device(np.array(part, np.int64), device)
            tokens[chosen] = _draw(logits[chosen].float(), [rows[i] for i in part])
    if only:
        places = to_device(np.array([*only.items()], np.int64), device)
        tokens[places[:, 0]] = places[:, 1]
    if logprobs is None:
        return SampledRows(_checked(tokens, spread), started)
    counts, wanted = _wanted(logprobs, [rows[i] for i in reported])
    own = logprobs.gather(1, tokens[where][:, None])[:, 0]
    details = (own, logprobs.gather(1, wanted), wanted)
    return SampledRows(_checked(tokens, spread), started, list(zip(reported, counts)), details)


def _biased(logits: torch.Tensor, biased: list[tuple[int, int, float]]) -> torch.Tensor:
    """Adds the biases of (row, token, bias), no place twice, to logits float32."""
    rows, tokens, biases = zip(*biased)
    places = to_device(np.array([rows, tokens], np.int64), logits.device)
    logits[places[0], places[1]] += to_device(np.array(biases, np.float32), logits.device)
    return logits


def _mask(logits: torch.Tensor, rows: list[int], masks: np.ndarray) -> None:
    """Leaves in the given rows of ``logits`` only what their ``masks``, uint8 [rows, bytes], allow.

    What is allowed may still be chosen where a penalty had ruled it out and nothing else is left.
    """
    where, bits = to_device(np.array(rows, np.int64), logits.device), to_device(masks, logits.device)
    each = to_device(2 ** np.arange(8, dtype=np.uint8), logits.device)
    allowed = (bits[:, :, None] & each).flatten(1)[:, : logits.shape[1]] > 0
    possible = logits[where].clamp(min=torch.finfo(logits.dtype).min)
    logits[where] = possible.masked_fill(~allowed, float("-inf"))


def _wanted(logprobs: torch.Tensor, rows: list[SamplingRow]) -> tuple[list[int], torch.Tensor]:
    """How many tokens each row reports besides its own, and which: int64 [r, most], the likeliest or its children."""
    counts = [len(row.children) or min(row.parameters.logprobs or 0, logprobs.shape[1]) for row in rows]
    most = max(counts)
    if not most:
        return counts, torch.zeros((len(rows), 0), dtype=torch.int64, device=logprobs.device)
    children = np.full((len(rows), most), -1, np.int64)
    for line, row in zip(children, rows):
        line[: len(row.children)] = row.children
    named = to_device(children, logprobs.device)
    return counts, torch.where(named < 0, logprobs.topk(most, dim=-1).indices, named)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    text = seed.to_bytes(16, "little", signed=True) + place.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) / (1 << 53)


def _draw(logits: torch.Tensor, rows: SequenceType[SamplingRow]) -> torch.Tensor:
    """Inverse of the cumulative distribution over tokens in order of likelihood, cut by min_p, top_k, then top_p."""

    def column(values: list[float]) -> torch.Tensor:
        return to_device(np.array(values, np.float32), logits.device)[:, None]

    vocabulary = logits.shape[1]
    temperature = column([row.parameters.temperature for row in rows])
    # Largest first and subtracted before the division, so that no temperature overflows.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / temperature.clamp(min=1e-6)
    least = column([math.log(row.parameters.min_p) if row.parameters.min_p > 0 else -math.inf for row in rows])
    scaled.masked_fill_(scaled < least, float("-inf"))
    top_k = column([row.parameters.top_k if row.parameters.top_k > 0 else vocabulary for row in rows])
    scaled.masked_fill_(torch.arange(vocabulary, device=logits.device) >= top_k, float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = column([row.parameters.top_p for row in rows])
    probabilities.masked_fill_(before >= top_p, 0)
    cumulative = probabilities.cumsum(dim=-1)
    target = column([uniform(row.seed, row.place) for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    kept = (probabilities > 0).sum(dim=-1, keepdim=True)
    return order.gather(1, place.minimum(kept - 1).clamp(min=0))[:, 0]  # of NaN none is kept


_DRAWN_AT_ONCE = 256  # rows, each of which takes 50 bytes a token of the vocabulary meanwhile
_LEAST_WIDTH = 256
_SPARE = 4
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
        device, lines, amounts = histories.device, rows.lines, rows.amounts
        numbers = [rows.places, lines[:, _SLOT], rows.lengths, lines[:, _PROMPT], lines[:, _SIZE]]
        self._histories = histories
        self._rows = rows
        self._width = int(rows.lengths.max())
        self._counts = bool(amounts[:, 1:].any())
        self._ngrams = bool(lines[:, _SIZE].any())
        self._places, self._slots, self._lengths, self._prompts, self._sizes = to_device(np.stack(numbers), device)
        self._repetition, self._frequency, self._presence = to_device(amounts.T, device)[:, :, None]
        if rows.drafted.any():
            behind = np.flatnonzero(rows.drafted)
            written = [lines[behind, _SLOT], rows.lengths[behind] - 1, rows.following[behind - 1]]
            slots, at, drafts = to_device(np.stack(written), device)
            histories.tokens[slots, at] = drafts.int()
        self._tokens = histories.tokens[self._slots, : self._width].long()
        self._echoes = self._echoes_of_drafts() if self._ngrams else None

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
        if self._echoes is not None:
            sizes = self._sizes[:, None]
            repeats = known & (sizes > 0) & (self._echoes >= sizes - 1)
            scores.scatter_(1, torch.where(repeats, tokens, vocabulary), float("-inf"))
        changed = scores[:, :vocabulary]
        if everybody:  # a batch's logits are large: nobody else's are copied, nor these once more
            return changed
        logits = logits.float()
        logits[self._places] = changed
        return logits

    def append(self, chosen: torch.Tensor) -> None:
        """``chosen`` int64 [m]: the step's tokens; where a draft was, those that it was right about, and the next."""
        histories = self._histories
        slots, lengths, tokens, echoes = self._slots, self._lengths, self._tokens, self._echoes
        chosen = chosen[self._places]
        if self._rows.drafted.any():
            last = self._last_right(chosen)
            chosen, slots, lengths, tokens = chosen[last], slots[last], lengths[last], tokens[last]
            echoes = None if echoes is None else echoes[last]
        if echoes is not None:
            histories.echoes[slots, 1 : self._width + 1] = _longer(echoes, tokens, chosen)
        histories.tokens[slots, lengths] = chosen.int()

    def _echoes_of_drafts(self) -> torch.Tensor:
        """int32 [r, width]: those of each row, of a line that ends where the row does."""
        echoes, drafted = self._histories.echoes[self._slots, : self._width], self._rows.drafted
        for step in range(int(drafted.max())):
            at = np.minimum(self._rows.lengths - drafted + step, self._width - 1)
            token = self._tokens.gather(1, to_device(at[:, None], echoes.device))[:, 0]
            behind = to_device(drafted > step, echoes.device)[:, None]
            echoes = pad(_longer(echoes, self._tokens, token), (1, 0))[:, : self._width].where(behind, echoes)
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


def _longer(echoes: torch.Tensor, tokens: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """What echoes at places 1.. are once ``token`` int64 [r] was appended; echoes and tokens [r, width]."""
    return (echoes + 1).where(tokens == token[:, None], 0)


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
