"""Steps of few tokens, prompts among them, as CUDA graphs: all layers but the last in one recorded launch.

Launching a step's kernels one by one takes the host about 20 ms, whatever the step's size: longer than the GPU computes
on seven prompts of 316 tokens in FP8. So whoever sends few requests at once waits for the host.

A graph is recorded for each of some numbers of tokens; a smaller step is filled up with tokens that touch no cache.
Embedding, last layer and sampling run as ever: their sizes differ from step to step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tessera.cuda_graphs import record
from tessera.engine.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch
from tessera.engine.models.qwen2 import Qwen2, Stream
from tessera.engine.transfer import to_device
from tessera.fp8.rows import Fp8Sums

MOST_SEQUENCES = 128
_MOST_CONTEXT = 4096  # each query block reads a context alone here, which is slow for long ones
_MOST_TOKENS = 2560  # from there on the GPU takes longer than the host
_SLOTS, _ROPE_LENGTHS, _POSITIONS = range(3)


class PromptGraphs:
    """Steps of up to ``max(sizes)`` tokens of ``most_sequences``, which hold at most ``most_blocks`` each.

    The model has more than one layer.
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
        most = self._sizes[-1]
        self._most_sequences = most_sequences
        self._pieces = attention.static_pieces(most_sequences, most, self._most_blocks)
        self._tokens = torch.zeros((_POSITIONS + model.rotary.axes) * most, dtype=torch.int64, device=self._device)
        # The residual stream, which begins as what the embedding gives; beside it, what the layers give.
        self._residual = torch.zeros((most, model.config.hidden_size), dtype=weight.dtype, device=self._device)
        self._x = torch.zeros_like(self._residual)
        self._x_scales = torch.zeros((most, 1), dtype=torch.float32, device=self._device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._column_scales: dict[int, torch.Tensor | None] = {}  # where x lacks an FP8 product's scales

    def capture(self) -> None:
        """Records the graphs."""
        self._replays = record("prompt graphs", self._sizes, self._fill_with_dummies, self._run, self._device)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a step has a graph."""
        sequences, most = packed.table.blocks.shape
        return len(packed.ids) <= self._sizes[-1] and sequences <= self._most_sequences and most <= self._most_blocks

    def run(self, packed: PackedBatch, x: torch.Tensor) -> Stream:
        """As :meth:`Qwen2.lower_layers`, for a step that fits; views that the next step overwrites."""
        count = len(packed.ids)
        size = next(size for size in self._sizes if size >= count)
        lines = np.zeros((_POSITIONS + self._model.rotary.axes, size), np.int64)
        lines[_SLOTS] = -1
        lines[_SLOTS, :count] = packed.slots
        lines[_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_POSITIONS:, :count] = packed.positions
        self._view(size).copy_(to_device(lines, self._device))
        self._pieces.load(packed.table)
        self._residual[:count].copy_(x)
        self._replays[size]()
        made, scales = self._x[:count], self._column_scales[size]
        return made if scales is None else Fp8Sums(made, self._x_scales[:count], scales), self._residual[:count]

    def _fill_with_dummies(self, size: int) -> None:
        self._view(size).zero_()[_SLOTS] = -1

    def _run(self, size: int) -> None:
        """From static memory into static memory."""
        lines = self._view(size)
        cos, sin = self._model.rotary.angles(lines[_POSITIONS:], lines[_ROPE_LENGTHS])
        step = AttentionStep(cos, sin, lines[_SLOTS], None, self._pieces.plan(size))
        x, residual = self._model.lower_layers(self._residual[:size], self._attention, step)
        assert residual is not None and residual.data_ptr() == self._residual.data_ptr()  # norms add in place
        self._column_scales[size] = None
        if isinstance(x, Fp8Sums):
            self._x_scales[:size].copy_(x.x_scales)
            self._column_scales[size] = x.scales
        self._x[:size].copy_(x.sums if isinstance(x, Fp8Sums) else x)

    def _view(self, size: int) -> torch.Tensor:
        """int64 [2 + axes, size]."""
        return self._tokens[: (_POSITIONS + self._model.rotary.axes) * size].view(-1, size)


def prompt_sizes(largest: int) -> list[int]:
    """Numbers of tokens worth a graph in steps of up to ``largest``: from 640 tokens on an eighth at most is wasted."""
    sizes = [*range(64, 1024, 64), *range(1024, _MOST_TOKENS + 1, 128)]
    return sorted({min(size, largest) for size in sizes})
