"""A scheduled batch as arrays, and what of it is on the device already."""

from __future__ import annotations

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
    """

    ids: np.ndarray
    source: np.ndarray
    positions: np.ndarray
    rope_lengths: np.ndarray
    slots: np.ndarray
    sample_rows: np.ndarray
    table: SpanTable
    sampling: np.ndarray


def pack(batch: ScheduledBatch, block_size: int, previous: Mapping[int, int]) -> PackedBatch:
    """Packs the batch's spans. ``previous``: by id(sequence), its place among the tokens of the step before this."""
    spans = batch.spans
    start = np.array([span.start for span in spans])
    context = np.array([span.end for span in spans])
    count = context - start
    row = np.cumsum(count) - count
    sampling = np.array([span.samples for span in spans])

    tables = [span.sequence.block_table for span in spans]
    # Filled up with blocks of the sequence's own: a backend may read, and mask, what lies there.
    blocks = np.repeat(np.array([table[:1] for table in tables], np.int64), max(map(len, tables)), axis=1)
    for line, table in zip(blocks, tables):
        line[: len(table)] = table

    owner = np.repeat(np.arange(len(spans)), count)
    index = np.arange(len(owner)) - np.repeat(row - start, count)
    source = np.full(len(owner), -1)
    for span, last in zip(spans, row + count - 1):
        if span.end > span.sequence.known:  # its token is still being sampled
            source[last] = previous[id(span.sequence)]
    prompt = np.array([span.sequence.prompt_length for span in spans])
    return PackedBatch(
        ids=np.concatenate([span.sequence.ids[span.start : span.end] for span in spans]),
        source=source,
        positions=_positions(batch, index),
        # A prompt is rotated as a whole; what follows grows the length one by one.
        rope_lengths=np.maximum(prompt[owner], index + 1),
        slots=blocks[owner, index // block_size] * block_size + index % block_size,
        sample_rows=(row + count - 1)[sampling],
        table=SpanTable(row, count, context, blocks),
        sampling=sampling,
    )


def fill_in(ids: torch.Tensor, source: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
    """``ids``, and where ``source`` >= 0 the token of the step before that it names; all int64 [n].

    A sequence that was given no token (NOT_FINITE) runs once more, for nobody, with token 0.
    """
    return torch.where(source < 0, ids, last_sampled[source.clamp(min=0)].clamp(min=0))


def _positions(batch: ScheduledBatch, index: np.ndarray) -> np.ndarray:
    if all(span.sequence.request.positions is None for span in batch.spans):
        return index[None]
    parts = [span.sequence.positions(span.start, span.end) for span in batch.spans]
    axes = max(len(part) for part in parts)
    return np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in parts], axis=1)


def image_rows(
    batch: ScheduledBatch, row: np.ndarray, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of the packed batch that pictures fill, int64 [r], and what with, [r, hidden] of ``dtype``; None if none.

    ``row`` int64 [s]: where each of the batch's spans begins.
    """
    indices, rows = [], []
    for span, first in zip(batch.spans, row):
        embeddings = span.sequence.embeddings
        if embeddings is None:
            continue
        positions, which = span.sequence.image_rows(span.start, span.end)
        if len(positions):
            indices.append(positions - span.start + first)
            rows.append(embeddings[which].to(device, dtype, non_blocking=True))
    if not rows:
        return None, None
    return to_device(np.concatenate(indices), device), torch.cat(rows)
