"""A scheduled batch as arrays, and what of it is on the device already."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from tessera.attention.backend import LastQueries, SpanTable
from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan


@dataclass(frozen=True)
class PackedBatch:
    """One step on the host; n packed tokens, s sequences, m tokens to choose.

    ``ids`` int64 [n]; ``source`` int64 [n]: which token of the step before stands there, -1 where ``ids`` knows it;
    ``positions`` int64 [axes, n], or [1, n] where all axes agree; ``rope_lengths`` int64 [n], the sequence length that
    rules each token's rotary base; ``slots`` int64 [n]; ``table`` describes the sequences; ``samples`` int64 [s]: how
    many tokens each chooses. ``decodes``: whether each sequence continues its answer, by one token and a draft's.
    """

    ids: np.ndarray
    source: np.ndarray
    positions: np.ndarray
    rope_lengths: np.ndarray
    slots: np.ndarray
    table: SpanTable
    samples: np.ndarray
    decodes: bool

    @cached_property
    def last(self) -> LastQueries:
        """The m queries that tokens are chosen from."""
        return self.table.last(self.samples)


def pack(
    batch: ScheduledBatch, block_size: int, previous: Mapping[int, int], before: PackedBatch | None = None
) -> PackedBatch:
    """Packs the batch's spans. ``previous``: by request number, its place among the tokens of the step before this, of
    those that stand alone there. ``before``: that step, if it sampled for the same requests in the same order."""
    if before is not None and (goes_on := _advanced(batch, block_size, before)) is not None:
        return goes_on
    spans = batch.spans
    sequences = [span.sequence for span in spans]
    numbers = [
        (span.start, span.end, span.samples, sequence.prompt_length, len(sequence.outputs), sequence.position_offset)
        for span, sequence in zip(spans, sequences)
    ]
    start, context, samples, prompt, said, offset = np.fromiter(chain(*numbers), np.int64).reshape(-1, 6).T
    count = context - start
    row = count.cumsum() - count
    blocks = _padded([sequence.block_table for sequence in sequences])

    owner = np.arange(len(spans)).repeat(count)
    index = np.arange(len(owner)) + (start - row)[owner]
    ids = np.concatenate(
        [sequence.ids[span.start : span.end] for span, sequence in zip(spans, sequences)], dtype=np.int64
    )
    source = np.full(len(owner), -1)
    # The only token of some is still being sampled; a draft's tokens are known.
    unknown = context > prompt + said + (samples - 1).clip(0)
    ids[row[unknown]] = 0
    source[row[unknown]] = [previous[sequences[place].request.number] for place in unknown.nonzero()[0].tolist()]
    reading = [(spans[place], int(row[place])) for place in (start < prompt).nonzero()[0].tolist()]
    return PackedBatch(
        ids=ids,
        source=source,
        positions=_given_positions(index + offset[owner], reading),
        # A prompt is rotated as a whole; what follows grows the length one by one.
        rope_lengths=np.maximum(prompt[owner], index + 1),
        slots=blocks[owner, index // block_size] * block_size + index % block_size,
        table=SpanTable(row, count, context, blocks),
        samples=samples,
        decodes=not reading and bool((samples == count).all()),
    )


def _advanced(batch: ScheduledBatch, block_size: int, before: PackedBatch) -> PackedBatch | None:
    """The batch made of the one ``before``, where each sequence decoded and goes on with a token that is still being
    sampled; else None."""
    spans, rows = batch.spans, before.table.row
    if not before.decodes or not len(rows) == len(spans) == batch.rows:
        return None
    if any(span.sequence.in_flight < 2 for span in spans):
        return None
    index = before.table.context
    blocks, context = _padded([span.sequence.block_table for span in spans]), index + 1
    return replace(
        before,
        ids=np.zeros(len(rows), np.int64),
        source=rows,
        positions=before.positions + 1,
        rope_lengths=context,
        slots=blocks[rows, index // block_size] * block_size + index % block_size,
        table=replace(before.table, context=context, blocks=blocks),
    )


def _padded(tables: SequenceType[array[int]]) -> np.ndarray:
    """int64 [s, most blocks]: what is shorter than others is filled up with its own first block, as a backend may read,
    and mask, what lies there."""
    lengths = np.array([len(table) for table in tables])
    known, columns = np.frombuffer(b"".join(tables), np.int64), np.arange(lengths.max())
    blocks = np.empty((len(tables), len(columns)), np.int64)
    blocks[:] = known[lengths.cumsum() - lengths][:, None]
    blocks[columns < lengths[:, None]] = known
    return blocks


def fill_in(ids: torch.Tensor, source: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
    """``ids``, and where ``source`` >= 0 the token of the step before that it names; all int64 [n].

    A sequence that was given no token (NOT_FINITE) runs once more, for nobody, with token 0.
    """
    return torch.where(source < 0, ids, last_sampled[source.clamp(min=0)].clamp(min=0))


def _given_positions(positions: np.ndarray, reading: list[tuple[ScheduledSpan, int]]) -> np.ndarray:
    """``positions`` [n] on one axis, or on more where a prompt was given its own, which are then put in.

    ``reading``: the spans that hold some of their prompt, and where each begins.
    """
    positions = positions[None]
    for span, first in reading:
        if (given := span.sequence.request.positions) is not None:
            if len(positions) < len(given):
                positions = positions.repeat(len(given), axis=0)
            part = given[:, span.start : span.end]
            positions[:, first : first + part.shape[1]] = part
    return positions


class Pictures(NamedTuple):
    """``places`` int64 [r]: rows of a packed batch that pictures fill; ``rows`` [r, row_size]: what with."""

    places: np.ndarray
    rows: torch.Tensor


def pictures_of(batch: ScheduledBatch, row: np.ndarray, device: torch.device, dtype: torch.dtype) -> Pictures | None:
    """The batch's, in ``dtype`` on ``device``; None if it has none. ``row`` int64 [s]: where its spans begin."""
    places, rows = [], []
    for span, first in zip(batch.spans, row):
        embeddings = span.sequence.embeddings
        if embeddings is None or span.start >= span.sequence.prompt_length:
            continue
        positions, which = span.sequence.image_rows(span.start, span.end)
        if len(positions):
            places.append(positions - span.start + first)
            rows.append(embeddings[which].to(device, dtype, non_blocking=True))
    if not rows:
        return None
    return Pictures(np.concatenate(places), torch.cat(rows) if len(rows) > 1 else rows[0])
