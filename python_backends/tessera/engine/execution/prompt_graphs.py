"""Steps of few tokens, prompts among them, as CUDA graphs: all layers in one recorded launch.

Launching a step's kernels one by one takes the host about 20 ms, whatever the step's size: longer than the GPU computes
on seven prompts of 316 tokens in FP8. So whoever sends few requests at once waits for the host.

A graph is recorded for each of some numbers of tokens; a smaller step is filled up with tokens that touch no cache.
Embedding and sampling run as ever: their sizes differ from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from tessera.cuda_graphs import record
from tessera.engine.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch
from tessera.engine.models.qwen2 import Qwen2
from tessera.engine.transfer import load

_MOST_CONTEXT = 4096  # each query block reads a context alone here, which is slow for long ones
_MOST_PRODUCTS = 17e12  # multiplications of a step; from there on the GPU takes longer than the host
_SLOTS, _ROPE_LENGTHS, _POSITIONS = range(3)


class PromptGraphs:
    """Steps of up to ``max(sizes)`` tokens of ``most_sequences``, which hold at most ``most_blocks`` each.

    On the CPU nothing is recorded: a replay runs the same layers one by one.
    """

    def __init__(
        self, model: Qwen2, attention: AttentionBackend, sizes: list[int], most_sequences: int, most_blocks: int
    ) -> None:
        weight = model.embedding.get_buffer("weight")
        self._model = model
        self._attention = attention
        self._sizes = sorted(sizes)
        self._most_blocks = min(most_blocks, -(-_MOST_CONTEXT // attention.storage.block_size))
        self._device = weight.device
        most, hidden = self._sizes[-1], model.config.hidden_size
        self._most_sequences = most_sequences
        self._pieces = attention.static_pieces(most_sequences, most, self._most_blocks)
        self._tokens = torch.zeros((_POSITIONS + model.rotary.axes) * most, dtype=torch.int64, device=self._device)
        self._x = torch.zeros((most, hidden), dtype=weight.dtype, device=self._device)
        self._hidden = torch.zeros((min(most, most_sequences), hidden), dtype=weight.dtype, device=self._device)
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self) -> None:
        """Records the graphs."""
        self._replays = record("prompt graphs", self._sizes, self._fill_with_dummies, self._run, self._device)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a step has a graph."""
        sequences, most = packed.table.blocks.shape
        return len(packed.ids) <= self._sizes[-1] and sequences <= self._most_sequences and most <= self._most_blocks

    def run(self, packed: PackedBatch, x: torch.Tensor) -> torch.Tensor:
        """A step that fits, its tokens embedded, x [n, hidden] -> normalised hidden rows of each sequence's last token,
        [s, hidden], a view that the next step overwrites."""
        count = len(packed.ids)
        size = next(size for size in self._sizes if size >= count)
        lines = np.zeros((_POSITIONS + self._model.rotary.axes, size), np.int64)
        lines[_SLOTS] = -1
        lines[_SLOTS, :count] = packed.slots
        lines[_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_POSITIONS:, :count] = packed.positions
        load(self._view(size), lines)
        self._pieces.load(packed.table)
        self._x[:count].copy_(x)
        self._replays[size]()
        return self._hidden[: len(packed.table.count)]

    def _fill_with_dummies(self, size: int) -> None:
        self._view(size).zero_()[_SLOTS] = -1

    def _run(self, size: int) -> None:
        """From static memory into static memory."""
        lines = self._view(size)
        cos, sin = self._model.rotary.angles(lines[_POSITIONS:], lines[_ROPE_LENGTHS])
        step = AttentionStep(cos, sin, lines[_SLOTS], None, self._pieces.plan(size))
        rows, plan = self._pieces.last(size)
        hidden = self._model.behind_layers(self._x[:size], self._attention, step, replace(step, rows=rows, plan=plan))
        self._hidden[: len(hidden)].copy_(hidden)

    def _view(self, size: int) -> torch.Tensor:
        """int64 [2 + axes, size]."""
        return self._tokens[: (_POSITIONS + self._model.rotary.axes) * size].view(-1, size)


def prompt_sizes(largest: int, products_a_token: int) -> list[int]:
    """Numbers of tokens worth a graph in steps of up to ``largest``, by the multiplications that one token costs: from
    640 tokens on an eighth at most is wasted."""
    most = min(largest, int(_MOST_PRODUCTS / products_a_token))
    sizes, size = [], 64
    while size < most:
        sizes.append(size)
        size += max(64, 1 << (size - 1).bit_length() - 4)
    return [*sizes, most]
