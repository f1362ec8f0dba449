"""Decode steps as CUDA graphs: one recorded launch instead of hundreds.

A graph is recorded for each of some batch sizes; a smaller batch is filled up with dummies, which touch no cache. And
each twice: whole, for the likeliest tokens, and without head and choice, for steps that sample, penalize or report.
Everything that changes from step to step stands in one static buffer, of which a step copies only the front: the
columns below are the sequences, and the block numbers, of which there are few or many, are the last rows.

Steps of few tokens, prompts among them, as CUDA graphs: all layers in one recorded launch.

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

from tessera.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch, fill_in
from tessera.engine.execution.sampler import greedy
from tessera.kernels.graphs import record
from tessera.kernels.transfer import load
from tessera.models.text.qwen2 import Qwen2

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


_MOST_CONTEXT = 4096  # each query block reads a context alone here, which is slow for long ones
_MOST_PRODUCTS = 17e12  # multiplications of a step; from there on the GPU takes longer than the host
_PROMPT_SLOTS, _PROMPT_ROPE_LENGTHS, _PROMPT_POSITIONS = range(3)


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
        self._tokens = torch.zeros(
            (_PROMPT_POSITIONS + model.rotary.axes) * most, dtype=torch.int64, device=self._device
        )
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
        lines = np.zeros((_PROMPT_POSITIONS + self._model.rotary.axes, size), np.int64)
        lines[_PROMPT_SLOTS] = -1
        lines[_PROMPT_SLOTS, :count] = packed.slots
        lines[_PROMPT_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_PROMPT_POSITIONS:, :count] = packed.positions
        load(self._view(size), lines)
        self._pieces.load(packed.table)
        self._x[:count].copy_(x)
        self._replays[size]()
        return self._hidden[: len(packed.table.count)]

    def _fill_with_dummies(self, size: int) -> None:
        self._view(size).zero_()[_PROMPT_SLOTS] = -1

    def _run(self, size: int) -> None:
        """From static memory into static memory."""
        lines = self._view(size)
        cos, sin = self._model.rotary.angles(lines[_PROMPT_POSITIONS:], lines[_PROMPT_ROPE_LENGTHS])
        step = AttentionStep(cos, sin, lines[_PROMPT_SLOTS], None, self._pieces.plan(size))
        rows, plan = self._pieces.last(size)
        hidden = self._model.behind_layers(self._x[:size], self._attention, step, replace(step, rows=rows, plan=plan))
        self._hidden[: len(hidden)].copy_(hidden)

    def _view(self, size: int) -> torch.Tensor:
        """int64 [2 + axes, size]."""
        return self._tokens[: (_PROMPT_POSITIONS + self._model.rotary.axes) * size].view(-1, size)


def prompt_sizes(largest: int, products_a_token: int) -> list[int]:
    """Numbers of tokens worth a graph in steps of up to ``largest``, by the multiplications that one token costs: from
    640 tokens on an eighth at most is wasted."""
    most = min(largest, int(_MOST_PRODUCTS / products_a_token))
    sizes, size = [], 64
    while size < most:
        sizes.append(size)
        size += max(64, 1 << (size - 1).bit_length() - 4)
    return [*sizes, most]
