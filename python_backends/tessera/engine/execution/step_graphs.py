"""Decode steps as CUDA graphs: one recorded launch instead of hundreds.

A graph is recorded for each of some batch sizes, and each twice: whole, for the likeliest tokens, and without head and
choice, for steps that sample, penalize or report. Behind those may run one more: head and likeliest tokens under
penalties. The columns of the static buffer are the queries, of a sequence one and those of its draft, and the block
numbers, of which there are few or many, are its last rows.

Steps of few tokens, prompts among them, as CUDA graphs: all layers in one recorded launch.

Launching a step's kernels one by one takes the host about 20 ms, whatever the step's size: longer than the GPU computes
on seven prompts of 316 tokens in FP8. So clients that send few requests at once would wait for the host. Only pictures'
rows are put in beforehand, and the choice runs as usual, or under penalties as the graph that decode steps have for it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tessera.attention.backend import AttentionBackend, AttentionStep
from tessera.engine.execution.batch_inputs import PackedBatch, Pictures, fill_in
from tessera.engine.execution.penalties import Histories
from tessera.engine.execution.sampler import greedy
from tessera.kernels.graphs import GraphPool
from tessera.kernels.operands import EARLY_ROWS
from tessera.kernels.transfer import Staging, to_device
from tessera.models.text.decoder import Qwen2

_IDS, _SOURCE, _SLOTS, _ROPE_LENGTHS, _POSITIONS = range(5)
_PICTURE = -2  # as the source of a token: a row of a picture stands there
_MOST_VERIFIED = 64  # queries: each reads its context alone here, those of one draft too


class _StepGraphs:
    """What changes from step to step stands in one static buffer of int64, of which a step copies the front: in rows as
    long as the graph's size the ids, their source (see PackedBatch), the slots, the lengths for the rotation and the
    positions by their axes, and behind these what a subclass has.

    A smaller step is filled up with dummies, which touch no cache. On the CPU nothing is recorded: a replay computes.
    """

    def __init__(
        self,
        model: Qwen2,
        attention: AttentionBackend,
        largest: int,
        more: int,
        hidden_rows: int,
        last_sampled: torch.Tensor,
    ) -> None:
        """``more``: integers behind the rows; ``last_sampled`` int64: the tokens of the step before."""
        weight = model.embedding.get_buffer("weight")
        self._model, self._attention, self._device, self._last_sampled = model, attention, weight.device, last_sampled
        self._header = _POSITIONS + model.rotary.axes
        self._inputs = torch.zeros(self._header * largest + more, dtype=torch.int64, device=weight.device)
        self._staging = Staging(self._inputs)
        self._hidden = torch.zeros((hidden_rows, model.config.hidden_size), dtype=weight.dtype, device=weight.device)

    def _put_lines(self, packed: PackedBatch, size: int) -> tuple[np.ndarray, np.ndarray]:
        """A step's rows, int64 [header, size], and what lies behind them, on the host, for ``_staging`` to send."""
        count, flat = len(packed.ids), self._staging.front()
        lines = flat[: self._header * size].reshape(-1, size)
        lines[:, count:] = 0
        lines[_SOURCE, count:] = lines[_SLOTS, count:] = -1
        lines[_IDS, :count], lines[_SOURCE, :count], lines[_SLOTS, :count] = packed.ids, packed.source, packed.slots
        lines[_ROPE_LENGTHS, :count] = packed.rope_lengths
        lines[_POSITIONS:, :count] = packed.positions
        return lines, flat[lines.size :]

    def _fill_with_dummies(self, size: int) -> None:
        self._inputs.zero_()
        self._view(size)[[_SOURCE, _SLOTS]] = -1

    def _tokens(self, lines: torch.Tensor) -> torch.Tensor:
        """Those of the buffer's rows, int64 [size]."""
        return fill_in(lines[_IDS], lines[_SOURCE], self._last_sampled)

    def _step(self, lines: torch.Tensor, plan: Any) -> AttentionStep:
        cos, sin = self._model.rotary.angles(lines[_POSITIONS:], lines[_ROPE_LENGTHS])
        return AttentionStep(cos, sin, lines[_SLOTS], None, plan)

    def _view(self, size: int) -> torch.Tensor:
        """The buffer's rows for a size: int64 [header, size]."""
        return self._inputs[: self._header * size].view(-1, size)


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
        super().__init__(model, attention, largest, (1 + most_blocks) * largest, largest, last_sampled)
        self._most_blocks, self._histories = most_blocks, histories
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

    def greedy(self, size: int, count: int) -> torch.Tensor:
        """Runs the batch of ``count`` queries that was :meth:`put` last; its likeliest tokens, int64 [count], a view
        that the next step overwrites."""
        self._greedy.replay(size)
        return self._last_sampled[:count]

    def hidden(self, size: int, count: int) -> torch.Tensor:
        """The same; what the head makes its logits of, [count, hidden]. ``last_sampled`` stays as it is."""
        self._layers.replay(size)
        return self._hidden[:count]

    def chooses(self, rows: int) -> bool:
        """Whether :meth:`penalized` has a graph for this many."""
        return rows <= self._penalized.sizes[-1]

    def penalized(self, hidden: torch.Tensor) -> torch.Tensor:
        """:meth:`hidden`'s rows, or those of another step, [m, hidden] -> the likeliest tokens under the penalties of
        ``histories``, which then hold these too; int64 [m], a view that the next step overwrites."""
        count = len(hidden)
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[:count].copy_(hidden)
        self._penalized.replay(self._penalized.size_for(count))
        return self._last_sampled[:count]

    def _columns(self, packed: PackedBatch) -> int:
        """How many of them a batch takes. A draft's queries see keys that the step itself stores; smaller graphs may
        fetch them too early (``settled``)."""
        count = len(packed.ids)
        return count if count == len(packed.table.row) else max(count, EARLY_ROWS + 1)

    def put(self, packed: PackedBatch) -> int:
        """Puts a batch that fits into the static inputs; the size of its graph."""
        count, table = len(packed.ids), packed.table
        size = self._greedy.size_for(self._columns(packed))
        if count > len(table.row):
            table = table.singles(packed.last)
        lines, behind = self._put_lines(packed, size)
        given = behind[: (1 + table.blocks.shape[1]) * size].reshape(-1, size)
        given[:, count:] = 0
        given[0, :count], given[1:, :count] = table.context, table.blocks.T
        self._staging.send(lines.size + given.size)
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
        behind = self._inputs[lines.numel() : lines.numel() + (1 + self._most_blocks) * size].view(-1, size)
        step = self._step(lines, self._attention.captured_plan(behind[0], behind[1:], settled=True))
        x = self._model.embedding.tokens(self._tokens(lines))
        return self._model.forward_layers(x, self._attention, step, step)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: every one that is small, then in growing steps, so that a tenth or so is wasted."""
    sizes = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, largest + 64, 64)
    return sorted({min(size, largest) for size in sizes})


_MOST_CONTEXT = 4096  # each query block reads a context alone here, which is slow for long ones
_MOST_PRODUCTS = 17e12  # multiplications of a step; from there on the GPU takes longer than the host


class PromptGraphs(_StepGraphs):
    """Steps of up to ``max(sizes)`` tokens of ``most_sequences``, which hold at most ``most_blocks`` each, and that
    choose up to ``max(row_counts)`` tokens; recorded as this is made.

    For each of ``row_counts`` there are graphs of their own, for in a graph the last layer runs for as many rows as may
    be chosen from.
    """

    def __init__(
        self,
        model: Qwen2,
        attention: AttentionBackend,
        sizes: list[int],
        most_sequences: int,
        row_counts: list[int],
        most_blocks: int,
        last_sampled: torch.Tensor,
    ) -> None:
        # Only our own kernels read plans from static memory, and triton need not be there without graphs.
        from tessera.attention.triton_backend import StaticPieces, TritonBackend

        assert isinstance(attention, TritonBackend)
        most, most_rows = max(sizes), max(row_counts)
        self._most_blocks = min(most_blocks, -(-_MOST_CONTEXT // attention.storage.block_size))
        self._most_sequences, self._most_rows = most_sequences, most_rows
        self._pieces = StaticPieces(attention, most_sequences, most_rows, self._most_blocks)
        super().__init__(model, attention, most, self._pieces.size(most), min(most, most_rows), last_sampled)
        self._x = self._hidden.new_zeros((most, model.config.row_size))
        self._graphs: dict[int, GraphPool] = {}
        counts, beside = sorted(row_counts), None
        for rows, fewer in reversed([*zip(counts, [0, *counts])]):
            if held := [size for size in sizes if size > fewer]:  # no step chooses more tokens than it has
                what = f"prompt graphs of {rows} tokens to choose"
                beside = GraphPool(what, held, partial(self._run, rows), self._device, beside=beside)
                beside.record(self._fill_with_dummies)
                self._graphs[rows] = beside
        self._every = self._graphs[counts[0]]  # the graphs of fewest rows have all sizes

    def fits(self, packed: PackedBatch) -> bool:
        """Whether a step has a graph."""
        sequences, most = packed.table.blocks.shape
        fits = sequences <= self._most_sequences and len(packed.last.row) <= self._most_rows
        return fits and len(packed.ids) <= self._every.sizes[-1] and most <= self._most_blocks

    def put(self, packed: PackedBatch, pictures: Pictures | None) -> int:
        """Puts a step that fits into the static inputs, with its pictures; the size of its graph."""
        size = self._every.size_for(len(packed.ids))
        lines, behind = self._put_lines(packed, size)
        if pictures is not None:
            lines[_SOURCE, pictures.places] = _PICTURE
            self._x.index_copy_(0, to_device(pictures.places, self._device), pictures.rows)
        self._staging.send(lines.size + self._pieces.fill(behind, size, packed.table, packed.last))
        return size

    def run(self, size: int, rows: int) -> torch.Tensor:
        """Runs what was :meth:`put` last -> normalised hidden rows of the queries that its ``rows`` tokens are chosen
        from, [rows, hidden], a view that the next step overwrites."""
        self._graphs[min(most for most in self._graphs if most >= rows)].replay(size)
        return self._hidden[:rows]

    def _run(self, most_rows: int, size: int) -> None:
        """From static memory into static memory."""
        lines = self._view(size)
        pieces = self._inputs[lines.numel() :]
        step = self._step(lines, self._pieces.plan(pieces, size))
        rows, plan = self._pieces.last(pieces, size, most_rows)
        x = self._model.embedding(self._tokens(lines))
        x = torch.where((lines[_SOURCE] == _PICTURE)[:, None], self._x[:size], x)
        hidden = self._model.forward_layers(x, self._attention, step, replace(step, rows=rows, plan=plan))
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
