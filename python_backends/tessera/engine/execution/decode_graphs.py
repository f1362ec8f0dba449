"""Decode steps as CUDA graphs: one recorded launch instead of hundreds.

A graph is recorded for each of some batch sizes; a smaller batch is filled up with dummies, which touch no cache.
Everything that changes from step to step stands in one static buffer, of which a step copies only the front: the
columns below are the sequences, and the block numbers, of which there are few or many, are the last rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tessera.engine.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch, fill_in
from tessera.engine.execution.recording import record
from tessera.engine.execution.sampler import greedy
from tessera.engine.models.qwen2 import Qwen2
from tessera.engine.transfer import to_device

_IDS, _SOURCE, _ROPE_LENGTHS, _SLOTS, _CONTEXT, _POSITIONS = range(6)


class DecodeGraphs:
    """Greedy decode steps of up to ``max(sizes)`` sequences.

    ``last_sampled`` int64 [>= max(sizes)] holds the tokens of the step before, and after a step its own. On the CPU
    nothing is recorded: a replay runs the same steps one by one.
    """

    def __init__(
        self, model: Qwen2, attention: AttentionBackend, sizes: list[int], most_blocks: int, last_sampled: torch.Tensor
    ) -> None:
        self._model = model
        self._attention = attention
        self._sizes = sorted(sizes)
        self._most_blocks = most_blocks
        self._last_sampled = last_sampled
        self._device = last_sampled.device
        self._header = _POSITIONS + model.rotary.axes
        rows = self._header + most_blocks
        self._inputs = torch.zeros(rows * self._sizes[-1], dtype=torch.int64, device=self._device)
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self) -> None:
        """Records the graphs."""
        self._replays = record("decode graphs", self._sizes, self._fill_with_dummies, self._run, self._device)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a batch of single, sampling queries has a graph; whether greedy will do is for the caller."""
        sequences, most = packed.table.blocks.shape
        return sequences <= self._sizes[-1] and most <= self._most_blocks and len(packed.ids) == sequences

    def run(self, packed: PackedBatch) -> torch.Tensor:
        """Runs a batch that fits; its tokens, int64 [s], a view that the next step overwrites."""
        count = len(packed.ids)
        size = next(size for size in self._sizes if size >= count)
        most = packed.table.blocks.shape[1]
        lines = np.zeros((self._header + most, size), np.int64)
        lines[[_SOURCE, _SLOTS]] = -1
        lines[_IDS, :count] = packed.ids
        lines[_SOURCE, :count] = packed.source
        lines[_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_SLOTS, :count] = packed.slots
        lines[_CONTEXT, :count] = packed.table.context
        lines[_POSITIONS : self._header, :count] = packed.positions
        lines[self._header :, :count] = packed.table.blocks.T
        self._inputs[: lines.size].copy_(to_device(lines.reshape(-1), self._device))
        self._replays[size]()
        return self._last_sampled[:count]

    def _fill_with_dummies(self, size: int) -> None:
        self._inputs.zero_()
        self._view(size)[[_SLOTS, _SOURCE]] = -1

    def _run(self, size: int) -> None:
        lines = self._view(size)
        ids = fill_in(lines[_IDS], lines[_SOURCE], self._last_sampled)
        cos, sin = self._model.rotary.angles(lines[_POSITIONS : self._header], lines[_ROPE_LENGTHS])
        plan = self._attention.captured_plan(lines[_CONTEXT], lines[self._header :])
        step = AttentionStep(cos, sin, lines[_SLOTS], None, plan)
        hidden = self._model(ids, None, None, self._attention, step, step)
        self._last_sampled[:size].copy_(greedy(self._model.logits(hidden)))

    def _view(self, size: int) -> torch.Tensor:
        """The buffer's front for a batch size: int64 [header + most_blocks, size]."""
        return self._inputs[: (self._header + self._most_blocks) * size].view(-1, size)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: every one that is small, then in growing steps, so that a tenth or so is wasted."""
    sizes = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 64, 64)
    return sorted({min(size, largest) for size in sizes})
