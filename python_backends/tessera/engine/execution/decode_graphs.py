"""Decode steps as CUDA graphs: one recorded launch instead of hundreds.

A graph is recorded for each of some batch sizes; a smaller batch is filled up with dummies, which touch no cache. And
each twice: whole, for the likeliest tokens, and without head and choice, for steps that sample, penalize or report.
Everything that changes from step to step stands in one static buffer, of which a step copies only the front: the
columns below are the sequences, and the block numbers, of which there are few or many, are the last rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tessera.cuda_graphs import record
from tessera.engine.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch, fill_in
from tessera.engine.execution.sampler import greedy
from tessera.engine.models.qwen2 import Qwen2
from tessera.engine.transfer import load

_IDS, _SOURCE, _ROPE_LENGTHS, _SLOTS, _CONTEXT, _POSITIONS = range(6)


class DecodeGraphs:
    """Decode steps of up to ``max(sizes)`` sequences.

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
        embedding = model.embedding.get_buffer("weight")
        shape = self._sizes[-1], model.config.hidden_size
        self._hidden = torch.zeros(shape, dtype=embedding.dtype, device=self._device)
        self._greedy: dict[int, Callable[[], None]] = {}
        self._layers: dict[int, Callable[[], None]] = {}

    def capture(self) -> None:
        """Records the graphs."""
        for_all = self._sizes, self._fill_with_dummies
        self._greedy = record("decode graphs", *for_all, self._run_greedy, self._device)
        self._layers = record("decode graphs without the choice", *for_all, self._run_layers, self._device)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a batch of single, sampling queries has a graph."""
        sequences, most = packed.table.blocks.shape
        return sequences <= self._sizes[-1] and most <= self._most_blocks and len(packed.ids) == sequences

    def greedy(self, packed: PackedBatch) -> torch.Tensor:
        """Runs a batch that fits; its likeliest tokens, int64 [s], a view that the next step overwrites."""
        self._greedy[self._load(packed)]()
        return self._last_sampled[: len(packed.ids)]

    def hidden(self, packed: PackedBatch) -> torch.Tensor:
        """Runs a batch that fits; what the head makes its logits of, [s, hidden], a view that the next step overwrites.

        ``last_sampled`` stays as it is.
        """
        size = self._load(packed)
        self._layers[size]()
        return self._hidden[: len(packed.ids)]

    def _load(self, packed: PackedBatch) -> int:
        """Puts a batch into the static inputs; the size of its graph."""
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
        load(self._inputs[: lines.size], lines.reshape(-1))
        return size

    def _fill_with_dummies(self, size: int) -> None:
        self._inputs.zero_()
        self._view(size)[[_SLOTS, _SOURCE]] = -1

    def _run_greedy(self, size: int) -> None:
        self._last_sampled[:size].copy_(greedy(self._model.logits(self._compute(size))))

    def _run_layers(self, size: int) -> None:
        self._hidden[:size].copy_(self._compute(size))

    def _compute(self, size: int) -> torch.Tensor:
        """All layers over the static inputs, [size, hidden]."""
        lines = self._view(size)
        ids = fill_in(lines[_IDS], lines[_SOURCE], self._last_sampled)
        cos, sin = self._model.rotary.angles(lines[_POSITIONS : self._header], lines[_ROPE_LENGTHS])
        plan = self._attention.captured_plan(lines[_CONTEXT], lines[self._header :])
        step = AttentionStep(cos, sin, lines[_SLOTS], None, plan)
        return self._model(ids, None, None, self._attention, step, step)

    def _view(self, size: int) -> torch.Tensor:
        """The buffer's front for a batch size: int64 [header + most_blocks, size]."""
        return self._inputs[: (self._header + self._most_blocks) * size].view(-1, size)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: every one that is small, then in growing steps, so that a tenth or so is wasted."""
    sizes = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 64, 64)
    return sorted({min(size, largest) for size in sizes})
