"""Chooses tokens from logits.

A sampled token comes from one uniform number, which is a hash of the request's seed and the token's place in the
answer. So a request draws the same tokens whatever else is in the batch, and again after a preemption.

Of a deterministic server likelihoods are added up as integers, which come to the same sum in any order: torch adds
floating numbers in one that depends on how many rows there are, and on how a row lies in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from typing import NamedTuple

import numpy as np
import torch

from tessera.engine.execution.penalties import Penalties
from tessera.engine.sequence import MOST_MARGIN, NOT_FINITE, Report, SampledToken, SamplingParameters, Sequence
from tessera.kernels.fixed_rows import fixed
from tessera.kernels.operands import Allowed
from tessera.kernels.transfer import Moment, to_device, to_host
from tessera.kernels.tuning import layer_kernels

_ONE = 1 << 44  # a likelihood of 1; sums of 2**18 of them are integers of 64 bits


class SamplingRow(NamedTuple):
    """What one token needs: parameters, the seed, its place in the answer, and tokens that it may not be.

    ``children``: tokens whose log probabilities are asked for instead, where labels are scored. ``mask``: the tokens
    that it may be, uint8 [ceil(vocabulary / 8)] with the lowest bit first, or the only one; None: any. ``margin``:
    whether the token's is asked for.
    """

    parameters: SamplingParameters
    seed: int
    place: int
    forbidden: frozenset[int] = frozenset()
    children: tuple[int, ...] = ()
    mask: np.ndarray | int | None = None
    margin: bool = False

    @classmethod
    def of(cls, sequence: Sequence, drafted: int = 0) -> SamplingRow:
        """The row of a sequence's token that is in flight, or of that behind this many tokens of its draft; while it is
        short of min_tokens it may not stop."""
        parameters = sequence.request.sampling
        place, mask = sequence.place + drafted, sequence.mask(drafted)  # which knows of min_tokens
        short = place < parameters.min_tokens and mask is None
        forbidden = sequence.stop_ids if short else frozenset()
        return cls(parameters, sequence.seed, place, forbidden, sequence.children, mask, sequence.request.margin)


class SampledRows:
    """Chosen tokens, int64 ``ids`` [m], on their way to the host; nothing waits before :meth:`tokens`.

    ``started``: when all was there for the step that chose them.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        started: Moment,
        reported: SequenceType[tuple[int, int]] = (),
        details: SequenceType[torch.Tensor] = (),
    ) -> None:
        """``reported``: rows with log probabilities, and of how many tokens besides their own. ``details``: the r
        rows' own [r], those of the others [r, most], which these are, int64 [r, most], and the margins [r].
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
        for (row, count), own, values, wanted, margin in zip(self._reported, *details):
            chosen[row] = ids[row], Report(own, tuple(zip(wanted[:count], values[:count])), margin)
        return chosen

    def device_ns(self) -> int:
        """From ``started`` until the tokens were there; call it after :meth:`tokens`."""
        return self._arrived.since(self._started)

    def waited_ns(self, before: SampledRows) -> int:
        """From the tokens of an earlier step until this one ``started``, by the device: until the host hears of tokens
        it waits too. Call it after :meth:`tokens`."""
        return self._started.since(before._arrived)


def greedy(logits: torch.Tensor, allowed: Allowed | None = None) -> torch.Tensor:
    """logits of any float dtype [m, vocabulary] -> the likeliest tokens of those ``allowed``, int64 [m]; NOT_FINITE for
    a row with any NaN or infinity."""
    return layer_kernels(logits.device.type).likeliest(logits, allowed)


class Choices(NamedTuple):
    """What a step's m rows may choose, where all of them ask for the likeliest of it and nothing else."""

    only: np.ndarray  # int64 [m]: the only token that may come, or -1
    free: np.ndarray  # int64 [f]: the rows that have a choice
    masks: list[np.ndarray | None]  # of each of these, see Sequence.mask

    @classmethod
    def of(cls, sequences: SequenceType[Sequence]) -> Choices | None:
        """None where a sequence asks for more than the likeliest."""
        masks = list[np.ndarray | int | None]()
        for sequence in sequences:
            constrained = sequence.request.sampling.constraint is not None
            if not (sequence.likeliest if constrained else sequence.greedy):
                return None
            masks += map(sequence.mask, range(1 + len(sequence.draft)))
        only = np.array([mask if isinstance(mask, int) else -1 for mask in masks])
        return cls(only, np.flatnonzero(only < 0), [mask for mask in masks if not isinstance(mask, int)])

    def made(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """hidden [m, hidden size], of whose rows ``head`` makes the logits -> tokens, int64 [m]; NOT_FINITE for a row
        with any NaN or infinity. Where there is no choice no logits are made: most of an answer by a JSON schema is
        such, and they take as long as a layer or two. So what is NaN in the head alone is not seen there, where the
        form says what comes."""
        device = hidden.device
        if len(self.free) == len(hidden):
            return greedy(head(hidden), self._allowed(device))
        finite = hidden.abs().amax(dim=-1) < float("inf")
        tokens = torch.where(finite, to_device(self.only, device), NOT_FINITE)
        if len(self.free):
            free = to_device(self.free, device)
            tokens.index_copy_(0, free, greedy(head(hidden.index_select(0, free)), self._allowed(device)))
        return tokens

    def _allowed(self, device: torch.device) -> Allowed | None:
        """Of the rows that have a choice."""
        bits = [mask for mask in self.masks if mask is not None]
        if not bits:
            return None
        masked = np.array([mask is not None for mask in self.masks])
        lines = np.where(masked, masked.cumsum() - 1, -1)
        return Allowed(to_device(lines, device), to_device(np.stack(bits), device))


def sample(
    logits: torch.Tensor, rows: SequenceType[SamplingRow], started: Moment, penalties: Penalties | None = None
) -> SampledRows:
    """logits of any float dtype [m, vocabulary], m rows -> m tokens, NOT_FINITE for a row with any NaN or infinity.

    In this order: log probabilities and the search for NaN, both of the logits as they are; biases; penalties; tokens
    that may not be; temperature, min_p, top_k and top_p. ``logits`` itself may be changed.
    Indices go to the device by ``to_device``: plain lists as indices would wait for the whole step.
    """
    device = logits.device
    reported = [i for i, row in enumerate(rows) if row.parameters.logprobs is not None or row.children or row.margin]
    logprobs = None
    if reported:
        where = to_device(np.array(reported, np.int64), device)
        logprobs = _log_softmax(logits[where].float())
    lowest, highest = logits.aminmax(dim=-1)  # in one pass, and before any token is forbidden
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
        for first in range(0, len(drawn), _ROWS_AT_ONCE):
            part = drawn[first : first + _ROWS_AT_ONCE]
            chosen = to_device(np.array(part, np.int64), device)
            tokens[chosen] = _draw(logits[chosen].float(), [rows[i] for i in part])
    if only:
        places = to_device(np.array([*only.items()], np.int64), device)
        tokens[places[:, 0]] = places[:, 1]
    checked = torch.where(highest - lowest < float("inf"), tokens, NOT_FINITE)
    if logprobs is None:
        return SampledRows(checked, started)
    counts, wanted = _wanted(logprobs, [rows[i] for i in reported])
    own = logprobs.gather(1, tokens[where][:, None])[:, 0]
    details = (own, logprobs.gather(1, wanted), wanted, _margins(logits, rows, where))
    return SampledRows(checked, started, list(zip(reported, counts)), details)


def _counted(likelihoods: torch.Tensor) -> torch.Tensor:
    """Numbers of 0..1 as integers of _ONE."""
    return (likelihoods * _ONE).round().to(torch.int64)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Of rows [m, vocabulary], which may be overwritten."""
    if not fixed():
        return logits.log_softmax(dim=-1)
    logits -= logits.amax(dim=-1, keepdim=True)
    for part in logits.split(_ROWS_AT_ONCE):
        sums = _counted(part.exp()).sum(dim=-1, keepdim=True)
        part.sub_((sums.double() / _ONE).log().float())
    return logits


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


def _margins(logits: torch.Tensor, rows: SequenceType[SamplingRow], where: torch.Tensor) -> torch.Tensor:
    """The distances between the two likeliest tokens of the rows ``where`` int64 [r], float32 [r]. ``logits``: those by
    which tokens are chosen."""
    if not any(row.margin for row in rows):
        return torch.zeros(len(where), device=logits.device)
    best, second = logits[where].float().topk(2, dim=-1).values.unbind(dim=-1)
    forced = np.array([isinstance(row.mask, int) for row in rows])
    margins = (best - second).clamp(max=MOST_MARGIN)
    return margins.masked_fill(to_device(forced, logits.device)[where], MOST_MARGIN)


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
    return counts, torch.where(named < 0, _likeliest(logprobs, most), named)


def _likeliest(logprobs: torch.Tensor, most: int) -> torch.Tensor:
    """The likeliest tokens of each row, int64 [m, most]; of equal ones torch takes any, a deterministic server the
    first."""
    if not fixed():
        return logprobs.topk(most, dim=-1).indices
    tokens, chosen = torch.arange(logprobs.shape[1], device=logprobs.device), []
    for part in logprobs.split(_ROWS_AT_ONCE):
        bits = part.view(torch.int32).to(torch.int64)  # negative numbers, the larger the further from 0
        chosen.append((-(bits & 0x7FFFFFFF) * (1 << 32) - tokens).topk(most, dim=-1).indices)
    return torch.cat(chosen)


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
    shares = _counted(scaled.exp_()) if fixed() else scaled.softmax(dim=-1)
    before = shares.cumsum(dim=-1) - shares
    top_p = column([row.parameters.top_p for row in rows])
    if fixed():
        top_p = top_p.double() * shares.sum(dim=-1, keepdim=True)
    shares.masked_fill_(before >= top_p, 0)
    cumulative = shares.cumsum(dim=-1)
    target = column([uniform(row.seed, row.place) for row in rows]) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target.to(cumulative.dtype), right=True)
    kept = (shares > 0).sum(dim=-1, keepdim=True)
    return order.gather(1, place.minimum(kept - 1).clamp(min=0))[:, 0]  # of NaN none is kept


_ROWS_AT_ONCE = 256  # each of them takes up to 60 bytes a token of the vocabulary meanwhile
