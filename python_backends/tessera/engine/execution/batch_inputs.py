"""A scheduled batch as arrays, and what of it is on the device already."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tessera.engine.attention.backend import SpanTable
from tessera.engine.scheduling.batch import ScheduledBatch
from tessera.engine.transfer import to_device


@dataclass(frozen=True)
class PackedBatch:
    """One step on the host; n packed tokens, s sequences, m of them sampling.

    ``ids`` int64 [n]; ``source`` int64 [n]: which token of the step before stands there, -1 where ``ids`` knows it;
    ``positions`` int64 [axes, n]; ``rope_lengths`` int64 [n], the sequence length that rules each token's rotary
    base; ``slots`` int64 [n]; ``sample_rows`` int64 [m]; ``table`` and ``sampling`` (bool [s]) describe the sequences.
    ``decodes``: whether each of them continues its answer by one token.
    """

    ids: np.ndarray
    source: np.ndarray
    positions: np.ndarray
    rope_lengths: np.ndarray
    slots: np.ndarray
    sample_rows: np.ndarray
    table: SpanTable
    sampling: np.ndarray
    decodes: bool


def pack(batch: ScheduledBatch, block_size: int, previous: Mapping[int, int]) -> PackedBatch:
    """Packs the batch's spans. ``previous``: by id(sequence), its place among the tokens of the step before this."""
    spans = batch.spans
    numbers = [(span.start, span.end, span.samples, span.sequence.prompt_length, span.sequence.known) for span in spans]
    start, context, samples, prompt, known = np.array(numbers).T
    count = context - start
    row = np.cumsum(count) - count
    last, sampling = row + count - 1, samples > 0

    tables = [span.sequence.block_table for span in spans]
    held = np.array([len(table) for table in tables])
    # Filled up with blocks of the sequence's own: a backend may read, and mask, what lies there.
    blocks = np.repeat(np.array([table[:1] for table in tables], np.int64), held.max(), axis=1)
    blocks[np.arange(held.max()) < held[:, None]] = np.fromiter(itertools.chain.from_iterable(tables), np.int64)

    owner = np.repeat(np.arange(len(spans)), count)
    index = np.arange(len(owner)) - np.repeat(row - start, count)
    source = np.full(len(owner), -1)
    unknown = np.flatnonzero(context > known)  # whose last token is still being sampled
    source[last[unknown]] = [previous[id(spans[place].sequence)] for place in unknown]
    return PackedBatch(
        ids=np.concatenate([span.sequence.ids[span.start : span.end] for span in spans]),
        source=source,
        positions=_positions(batch, row, owner, index),
        # A prompt is rotated as a whole; what follows grows the length one by one.
        rope_lengths=np.maximum(prompt[owner], index + 1),
        slots=blocks[owner, index // block_size] * block_size + index % block_size,
        sample_rows=last[sampling],
        table=SpanTable(row, count, context, blocks),
        sampling=sampling,
        decodes=bool((sampling & (count == 1) & (start >= prompt)).all()),
    )


def fill_in(ids: torch.Tensor, source: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
    """``ids``, and where ``source`` >= 0 the token of the step before that it names; all int64 [n].

    A sequence that was given no token (NOT_FINITE) runs once more, for nobody, with token 0.
    """
    return torch.where(source < 0, ids, last_sampled[source.clamp(min=0)].clamp(min=0))


def _positions(batch: ScheduledBatch, row: np.ndarray, owner: np.ndarray, index: np.ndarray) -> np.ndarray:
    axes = max(span.sequence.position_axes for span in batch.spans)
    offset = np.array([span.sequence.position_offset for span in batch.spans])
    positions = np.tile(index + offset[owner], (axes, 1))
    for span, first in zip(batch.spans, row):
        if span.start < span.sequence.prompt_length and (given := span.sequence.request.positions) is not None:
            part = given[:, span.start : span.end]
            positions[:, first : first + part.shape[1]] = part
    return positions


def image_rows(
    batch: ScheduledBatch, row: np.ndarray, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of the packed batch that pictures fill, int64 [r], and what with, [r, hidden] of ``dtype``; None if none.

    ``row`` int64 [s]: where each of the batch's spans begins.
    """
    indices, rows = [], []
    for span, first in zip(batch.spans, row):
        embeddings = span.sequence.embeddings
        if embeddings is None or span.start >= span.sequence.prompt_length:
            continue
        positions, which = span.sequence.image_rows(span.start, span.end)
        if len(positions):
            indices.append(positions - span.start + first)
            rows.append(embeddings[which].to(device, dtype, non_blocking=True))
    if not rows:
        return None, None
    return to_device(np.concatenate(indices), device), torch.cat(rows)
