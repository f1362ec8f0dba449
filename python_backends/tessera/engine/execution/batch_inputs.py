"""A scheduled batch as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tessera.engine.attention.backend import SpanTable
from tessera.engine.scheduling.batch import ScheduledBatch


@dataclass(frozen=True)
class BatchInputs:
    """The tensors of one step; n packed tokens, s sequences, m of them sampling.

    ``ids`` int64 [n]; ``positions`` int64 [axes, n]; ``rope_lengths`` int64 [n], the sequence length that rules each
    token's rotary base; ``slots`` int64 [n]; ``image_index`` int64 [r] rows of the batch that ``image_rows``
    [r, hidden] replace; ``sample_rows`` int64 [m]; ``table`` and ``sampling`` (bool [s]) describe the sequences.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rope_lengths: torch.Tensor
    slots: torch.Tensor
    image_index: torch.Tensor | None
    image_rows: torch.Tensor | None
    sample_rows: torch.Tensor
    table: SpanTable
    sampling: np.ndarray


def build_inputs(batch: ScheduledBatch, block_size: int, device: torch.device, dtype: torch.dtype) -> BatchInputs:
    """Packs the batch's spans; pictures' rows are cast to ``dtype``."""
    spans = batch.spans
    start = np.array([span.start for span in spans])
    context = np.array([span.end for span in spans])
    count = context - start
    row = np.cumsum(count) - count
    sampling = np.array([span.samples for span in spans])

    most = max(len(span.sequence.block_table) for span in spans)
    blocks = np.zeros((len(spans), most), np.int64)
    for line, span in zip(blocks, spans):
        line[: len(span.sequence.block_table)] = span.sequence.block_table

    owner = np.repeat(np.arange(len(spans)), count)
    index = np.arange(len(owner)) - np.repeat(row - start, count)
    slots = blocks[owner, index // block_size] * block_size + index % block_size
    prompt = np.array([span.sequence.prompt_length for span in spans])
    image_index, image_rows = _image_rows(batch, row, device, dtype)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return BatchInputs(
        ids=tensor(np.concatenate([span.sequence.ids[span.start : span.end] for span in spans])),
        positions=tensor(_positions(batch, index)),
        # A prompt is rotated as a whole; what follows grows the length one by one.
        rope_lengths=tensor(np.maximum(prompt[owner], index + 1)),
        slots=tensor(slots),
        image_index=image_index,
        image_rows=image_rows,
        sample_rows=tensor((row + count - 1)[sampling]),
        table=SpanTable(row, count, context, blocks),
        sampling=sampling,
    )


def _positions(batch: ScheduledBatch, index: np.ndarray) -> np.ndarray:
    if all(span.sequence.request.positions is None for span in batch.spans):
        return index[None]
    parts = [span.sequence.positions(span.start, span.end) for span in batch.spans]
    axes = max(len(part) for part in parts)
    return np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in parts], axis=1)


def _image_rows(
    batch: ScheduledBatch, row: np.ndarray, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    indices, rows = [], []
    for span, first in zip(batch.spans, row):
        positions, which = span.sequence.image_rows(span.start, span.end)
        if len(positions) and span.sequence.embeddings is not None:
            indices.append(positions - span.start + first)
            rows.append(span.sequence.embeddings[which].to(device, dtype, non_blocking=True))
    if not rows:
        return None, None
    return torch.from_numpy(np.concatenate(indices)).to(device), torch.cat(rows)
