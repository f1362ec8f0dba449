"""Decode steps as CUDA graphs: one recorded launch instead of hundreds.

A graph is recorded for each of some batch sizes, and each twice: whole, for the likeliest tokens, and without head and
choice, for steps that sample, penalize or report. Behind those may run one more: head and likeliest tokens under
penalties. The columns of the static buffer are the queries, of a sequence one and those of its draft, and the block
numbers, of which there are few or many, are its last rows.

Steps of few tokens, prompts among them, as CUDA graphs: all layers in one recorded launch.

Launching a step's kernels one by one takes the host about 20 ms, whatever the step's size: longer than the GPU computes
on seven prompts of 316 tokens in FP8. So clients that send few requests at once would wait for the host. Embedding and
sampling run as usual: their sizes differ from step to step.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tessera.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch, fill_in
from tessera.engine.execution.penalties import Histories
from tessera.engine.execution.sampler import greedy
from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import EARLY_ROWS
from tessera.kernels.transfer import load
from tessera.models.text.decoder import Qwen2

_SLOTS, _ROPE_LENGTHS, _POSITIONS = range(3)
_OF_DECODING = 3  # rows behind these: ids, their source, contexts
_MOST_VERIFIED = 64  # queries: each reads its context alone here, those of one draft too


class _StepGraphs:
    """What changes from step to step stands in one static buffer, of which a step copies the front: its rows of int64
    are the slots, the lengths for the rotation, the positions by their axes, and ``more`` of a subclass.

    A smaller step is filled up with dummies, which touch no cache. On the CPU nothing is recorded: a replay computes.
    """

    def __init__(self, model: Qwen2, attention: AttentionBackend, largest: int, more: int, hidden_rows: int) -> None:
        weight = model.embedding.get_buffer("weight")
        self._model, self._attention, self._device = model, attention, weight.device
        self._header = _POSITIONS + model.rotary.axes
        self._rows = self._header + more
        self._inputs = torch.zeros(self._rows * largest, dtype=torch.int64, device=weight.device)
        self._hidden = torch.zeros((hidden_rows, model.config.hidden_size), dtype=weight.dtype, device=weight.device)

    def _lines(self, packed: PackedBatch, size: int, more: int = 0) -> np.ndarray:
        """A step's rows for the buffer, int64 [header + more, size]; those behind the header are zero."""
        count = len(packed.ids)
        lines = np.zeros((self._header + more, size), np.int64)
        lines[_SLOTS] = -1
        lines[_SLOTS, :count] = packed.slots
        lines[_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_POSITIONS : self._header, :count] = packed.positions
        return lines

    def _fill_with_dummies(self, size: int) -> None:
        self._view(size).zero_()[_SLOTS] = -1

    def _step(self, lines: torch.Tensor, plan: Any) -> AttentionStep:
        cos, sin = self._model.rotary.angles(lines[_POSITIONS : self._header], lines[_ROPE_LENGTHS])
        return AttentionStep(cos, sin, lines[_SLOTS], None, plan)

    def _view(self, size: int) -> torch.Tensor:
        """The buffer's front for a size: int64 [rows, size]."""
        return self._inputs[: self._rows * size].view(-1, size)


class DecodeGraphs(_StepGraphs):
    """Decode steps of up to ``max(sizes)`` queries of at most ``most_blocks``, recorded as this is made.

    ``last_sampled`` int64 [>= max(sizes)] holds the tokens of the step before, and after a step its own. ``histories``
    has reserved that many rows.
    """

    def __init__(
        self,
        model: Qwen2,
        attention: AttentionBackend,
        sizes: list[int],
        most_blocks: int,
        last_sampled: torch.Tensor,
        histories: Histories,
    ) -> None:
        largest = max(sizes)
        super().__init__(model, attention, largest, _OF_DECODING + most_blocks, largest)
        self._most_blocks = most_blocks
        self._last_sampled, self._histories = last_sampled, histories
        self._greedy = GraphPool("decode graphs", sizes, self._run_greedy, self._device)
        self._layers = GraphPool("decode graphs without the choice", sizes, self._run_layers, self._device)
        self._penalized = GraphPool("choices under penalties", sizes, self._run_penalized, self._device)
        for graphs in (self._greedy, self._layers, self._penalized):
            graphs.record(self._fill_with_dummies)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a batch has a graph."""
        few = len(packed.ids) <= max(len(packed.table.row), _MOST_VERIFIED)
        fits = packed.decodes and few and packed.table.blocks.shape[1] <= self._most_blocks
        return fits and self._columns(packed) <= self._greedy.sizes[-1]

    def greedy(self, packed: PackedBatch, penalized: bool = False) -> torch.Tensor:
        """Runs a batch that fits; its likeliest tokens, int64 [n], a view that the next step overwrites.

        ``penalized``: under the penalties of ``histories``, which then hold these tokens too.
        """
        size = self._load(packed)
        if penalized:
            self._layers.replay(size)
            self._penalized.replay(size)
        else:
            self._greedy.replay(size)
        return self._last_sampled[: len(packed.ids)]

    def hidden(self, packed: PackedBatch) -> torch.Tensor:
        """Runs a batch that fits; what the head makes its logits of, [n, hidden], a view that the next step overwrites.

        ``last_sampled`` stays as it is.
        """
        self._layers.replay(self._load(packed))
        return self._hidden[: len(packed.ids)]

    def _columns(self, packed: PackedBatch) -> int:
        """How many of them a batch takes. A draft's queries see keys that the step itself stores; smaller graphs may
        fetch them too early (``settled``)."""
        count = len(packed.ids)
        return count if count == len(packed.table.row) else max(count, EARLY_ROWS + 1)

    def _load(self, packed: PackedBatch) -> int:
        """Puts a batch into the static inputs; the size of its graph."""
        count, table = len(packed.ids), packed.table
        size = self._greedy.size_for(self._columns(packed))
        if count > len(table.row):
            table = table.singles(packed.last)
        lines = self._lines(packed, size, _OF_DECODING + table.blocks.shape[1])
        ids, source, context = lines[self._header : self._header + _OF_DECODING]
        source[:] = -1
        ids[:count], source[:count], context[:count] = packed.ids, packed.source, table.context
        lines[self._header + _OF_DECODING :, :count] = table.blocks.T
        load(self._inputs[: lines.size], lines.reshape(-1))
        return size

    def _run_greedy(self, size: int) -> None:
        self._last_sampled[:size].copy_(greedy(self._model.logits(self._compute(size))))

    def _run_layers(self, size: int) -> None:
        self._hidden[:size].copy_(self._compute(size))

    def _run_penalized(self, size: int) -> None:
        penalties = self._histories.of_size(size)
        chosen = greedy(penalties.applied(self._model.logits(self._hidden[:size])))
        penalties.append(chosen)
        self._last_sampled[:size].copy_(chosen)

    def _compute(self, size: int) -> torch.Tensor:
        """All layers over the static inputs, [size, hidden]."""
        lines = self._view(size)
        ids, source, context = lines[self._header : self._header + _OF_DECODING]
        ids = fill_in(ids, source, self._last_sampled)
        blocks = lines[self._header + _OF_DECODING :]
        step = self._step(lines, self._attention.captured_plan(context, blocks, settled=True))
        return self._model.forward_layers(self._model.embedding.tokens(ids), self._attention, step, step)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: every one that is small, then in growing steps, so that a tenth or so is wasted."""
    sizes = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 64, 64)
    return sorted({min(size, largest) for size in sizes})


_MOST_CONTEXT = 4096  # each query block reads a context alone here, which is slow for long ones
_MOST_PRODUCTS = 17e12  # multiplications of a step; from there on the GPU takes longer than the host


class PromptGraphs(_StepGraphs):
    """Steps of up to ``max(sizes)`` tokens of ``most_sequences``, which hold at most ``most_blocks`` each, and that
    choose ``most_rows`` tokens; recorded as this is made."""

    def __init__(
        self,
        model: Qwen2,
        attention: AttentionBackend,
        sizes: list[int],
        most_sequences: int,
        most_rows: int,
        most_blocks: int,
    ) -> None:
        # Only our own kernels read plans from static memory, and triton need not be there without graphs.
        from tessera.attention.triton_backend import StaticPieces, TritonBackend

        assert isinstance(attention, TritonBackend)
        most = max(sizes)
        super().__init__(model, attention, most, 0, min(most, most_rows))
        self._most_blocks = min(most_blocks, -(-_MOST_CONTEXT // attention.storage.block_size))
        self._most_sequences, self._most_rows = most_sequences, most_rows
        self._pieces = StaticPieces(attention, most_sequences, most_rows, most, self._most_blocks)
        self._x = self._hidden.new_zeros((most, model.config.row_size))
        self._graphs = GraphPool("prompt graphs", sizes, self._run, self._device)
        self._graphs.record(self._fill_with_dummies)

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a step has a graph."""
        sequences, most = packed.table.blocks.shape
        fits = sequences <= self._most_sequences and len(packed.last.row) <= self._most_rows
        return fits and len(packed.ids) <= self._graphs.sizes[-1] and most <= self._most_blocks

    def run(self, packed: PackedBatch, x: torch.Tensor) -> torch.Tensor:
        """A step that fits, its tokens embedded, x [n, hidden] -> normalised hidden rows of the queries that tokens are
        chosen from, [m, hidden], a view that the next step overwrites."""
        count = len(packed.ids)
        size = self._graphs.size_for(count)
        load(self._view(size), self._lines(packed, size))
        self._pieces.load(packed.table, packed.last)
        self._x[:count].copy_(x)
        self._graphs.replay(size)
        return self._hidden[: len(packed.last.row)]

    def _run(self, size: int) -> None:
        """From static memory into static memory."""
        step = self._step(self._view(size), self._pieces.plan(size))
        rows, plan = self._pieces.last(size)
        hidden = self._model.forward_layers(self._x[:size], self._attention, step, replace(step, rows=rows, plan=plan))
        self._hidden[: len(hidden)].copy_(hidden)


def prompt_sizes(largest: int, products_a_token: int) -> list[int]:
    """Numbers of tokens worth a graph in steps of up to ``largest``, by the multiplications that one token costs: from
    640 tokens on an eighth at most is wasted."""
    most = min(largest, int(_MOST_PRODUCTS / products_a_token))
    sizes, size = [], 64
    while size < most:
        sizes.append(size)
        size += max(64, 1 << (size - 1).bit_length() - 4)
    return [*sizes, most]
