"""Chooses tokens from logits.

A sampled token comes from one uniform number, which is a hash of the request's seed and the token's place in the
answer. So a request draws the same tokens whatever else is in the batch, and again after a preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

import torch

from tessera.engine.request import SamplingParameters
from tessera.engine.scheduling.batch import SampledToken
from tessera.engine.sequence import Sequence


@dataclass(frozen=True)
class SamplingRow:
    """What one token needs: parameters, the seed, its place in the answer, and tokens that it may not be."""

    parameters: SamplingParameters
    seed: int
    place: int
    forbidden: frozenset[int] = frozenset()

    @classmethod
    def of(cls, sequence: Sequence, place: int) -> SamplingRow:
        """The row of a sequence's next token; while it is short of min_tokens it may not stop."""
        parameters = sequence.request.sampling
        forbidden = sequence.stop_ids if place < parameters.min_tokens else frozenset()
        return cls(parameters, sequence.seed, place, forbidden)


def sample(logits: torch.Tensor, rows: SequenceType[SamplingRow]) -> list[SampledToken]:
    """logits float32 [m, vocabulary], m rows -> m tokens. Forbidden tokens are masked in ``logits`` itself."""
    reported = [i for i, row in enumerate(rows) if row.parameters.logprobs is not None]
    logprobs = logits[reported].log_softmax(dim=-1) if reported else None
    for i, row in enumerate(rows):
        if row.forbidden:
            logits[i, list(row.forbidden)] = float("-inf")
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.parameters.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[i] for i in drawn])
    ids = tokens.tolist()
    chosen = [SampledToken(token) for token in ids]
    if logprobs is not None:
        own = logprobs.gather(1, tokens[reported][:, None])[:, 0].tolist()
        tops = _tops(logprobs, [rows[i].parameters.logprobs or 0 for i in reported])
        for i, logprob, top in zip(reported, own, tops):
            chosen[i] = SampledToken(ids[i], logprob, top)
    return chosen


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    text = seed.to_bytes(16, "little", signed=True) + place.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) / (1 << 53)


def _draw(logits: torch.Tensor, rows: SequenceType[SamplingRow]) -> torch.Tensor:
    """Inverse of the cumulative distribution over tokens in order of likelihood, cut by top_k, then by top_p."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    vocabulary = logits.shape[1]
    temperature = column([row.parameters.temperature for row in rows])
    # Largest first and subtracted before the division, so that no temperature overflows.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / temperature.clamp(min=1e-6)
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
    return order.gather(1, place.minimum(kept - 1))[:, 0]


def _tops(logprobs: torch.Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    most = max(counts)
    if not most:
        return [()] * len(counts)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    return [
        tuple(zip(line_ids[:count], line_values[:count]))
        for line_ids, line_values, count in zip(ids.tolist(), values.tolist(), counts)
    ]
