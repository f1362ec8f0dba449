"""An account of what calls cost: its parts, whole and printing (bench_joules.py), and the language model's steps."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import figures
import torch
import torch.nn.functional as F
from energy import Cost, Lap, Repeater
from engine_load import Prompts
from recorded_calls import RecordedCalls

from tessera.checkpoint.config import CheckpointConfig
from tessera.engine.execution.model_runner import ModelRunner, load_model
from tessera.engine.execution.step_graphs import DecodeGraphs
from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Sequence
from tessera.kernels.fp8_rows import Fp8Sums
from tessera.kernels.tuning import layer_kernels
from tessera.models.text.qwen2 import Qwen2
from tessera.settings.stages import EngineConfig

CONTEXT = 8192
CACHE_BYTES = 2 << 30  # four steps of this context
LAST = "last_layer"
ALONE = ("embedding", "qkv", "output", "down", "fc2", LAST, "head")
"""Parts of which nothing within is measured: most are a product and nothing else."""


@dataclass(frozen=True)
class Ask:
    """A workload's request: its pictures' tiles, and the tokens it brings to steps, the answer's but the last too.

    ``together``: as many are in flight, where answers are so long that most steps read no prompt.
    """

    tiles: int
    prompt: int
    decoded: int = 3
    together: int = 0

    @property
    def picture_rows(self) -> int:
        return 256 * self.tiles

    @property
    def tokens(self) -> int:
        return self.prompt + self.decoded


ASKS = {"W1": Ask(1, 316), "W2": Ask(7, 1852)}
WRITERS = {"W4a": Ask(1, 316, 255, 64), "W4b": Ask(1, 316, 255, 10)}


@dataclass(frozen=True)
class Sizes:
    """Of the step and the forward."""

    tokens: int = 8192
    tiles: int = 32


@dataclass(frozen=True)
class Report:
    """Prints each cost as a row, and emits it for the record or for trial."""

    prefix: str
    command: str

    def title(self, text: str) -> None:
        columns = f"{'calls':>6} {'us a call':>10} {'mJ a call':>10} {'ms':>9} {'J':>9} {'W':>6} {'MHz':>6}"
        print(f"\n{text:42} {columns}", flush=True)

    def row(self, name: str, cost: Cost, of: Cost | None = None) -> None:
        """``of``: the whole that it is a part of."""
        one = f"{cost.us_a_call:10.1f} {1e3 * cost.of_a_call.joules:10.3f}"
        lap = f"{1e3 * cost.seconds:9.3f} {cost.joules:9.4f} {cost.watts:6.0f} {cost.mhz:6.0f}"
        share = f" {cost.joules / of.joules:6.1%}" if of else ""
        print(f"{name:42} {cost.calls:6} {one} {lap}{share}", flush=True)

    def figure(self, name: str, value: float, unit: str, **notes: object) -> None:
        """Nothing without a counter of joules."""
        if math.isnan(value):
            return
        figures.emit(f"{self.prefix}.{name}", float(f"{value:.5g}"), unit, self.command, **notes)

    def cost(self, name: str, cost: Cost, unit: str) -> None:
        notes = {"us_a_call": round(cost.us_a_call, 1), "calls": cost.calls}
        self.figure(name, cost.joules, unit, **notes, watts=round(cost.watts, 1), mhz=round(cost.mhz, 1))


@dataclass(frozen=True)
class Account:
    """The parts of a whole, what is ``within`` them (by "part/name"), and the whole."""

    parts: Mapping[str, Cost]
    within: Mapping[str, Cost]
    whole: Cost

    @property
    def joules(self) -> float:
        return sum(cost.joules for cost in self.parts.values())

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.parts.values())


# --- the language model


def step_of(prompts: Prompts, length: int, tokens: int, block_size: int) -> ScheduledBatch:
    """As many whole prompts as a step has room for, and the beginning of one more."""
    spans: list[ScheduledSpan] = []
    first = 0
    while tokens:
        sequence, count = Sequence(prompts.request(max_tokens=1)), min(length, tokens)
        blocks = -(-length // block_size)
        sequence.block_table = array("q", range(first, first + blocks))
        spans.append(ScheduledSpan(sequence, 0, count, count == length))
        first, tokens = first + blocks, tokens - count
    return ScheduledBatch(spans)


def decode_of(prompts: Prompts, ask: Ask, block_size: int) -> ScheduledBatch:
    """A step that continues as many answers as are in flight, as if what is there of them were prompt."""
    spans: list[ScheduledSpan] = []
    for number in range(ask.together):
        sequence = Sequence(prompts.request(max_tokens=1))
        blocks = -(-sequence.known // block_size)
        sequence.block_table = array("q", range(number * blocks, (number + 1) * blocks))
        spans.append(ScheduledSpan(sequence, sequence.known - 1, sequence.known, True))
    return ScheduledBatch(spans)


def completed(argument: Any) -> Any:
    """The sums of an FP8 product as the product: who is given them completes them in place, and so only once."""
    return argument._replace(sums=argument.sums.clone()).product() if isinstance(argument, Fp8Sums) else argument


def watch_step(recorded: RecordedCalls, model: Qwen2, attention: Any, decodes: bool = False) -> None:
    """The parts of a step. What the last layer does for the rows that are sampled is a part of its own, where others
    are not."""
    recorded.watch(model.embedding, "forward", "embedding")
    last = -1 if decodes else len(model.layers) - 1
    for number, layer in enumerate(model.layers):
        recorded.watch(layer.input_norm, "forward", "norm")
        recorded.watch(layer.qkv, "unfinished", "qkv")
        recorded.watch(layer.output, "unfinished", LAST if number == last else "output")
        recorded.watch(layer.post_norm, "forward", LAST if number == last else "norm")
        recorded.watch(layer.gate_up, "gated", LAST if number == last else "gate_up")
        recorded.watch(layer.down, "unfinished", LAST if number == last else "down")
    recorded.watch(attention, "attend", lambda layer, *_: LAST if layer == last else "attention", completed)
    recorded.watch(model.norm, "forward", "norm" if decodes else LAST)
    recorded.watch(model, "logits", "head")
    for owner, function in ((F, "linear"), (torch, "_scaled_mm")):
        recorded.watch(owner, function, "product")
    recorded.watch(F, "scaled_dot_product_attention", "sdpa")  # on the CPU
    recorded.watch(layer_kernels(model.norm.get_buffer("weight").device.type), "silu_and_multiply", "silu_multiply")
    kernels = sys.modules[type(attention).__module__]
    for name, function in (
        ("rotate_store", "rotate_and_store"), ("kernel", "decode_attention" if decodes else "prefill_attention"),
    ):  # fmt: skip
        if hasattr(kernels, function):
            recorded.watch(kernels, function, name, completed)


class Language:
    """The language model, and its steps."""

    def __init__(self, config: CheckpointConfig, device: str, quantization: str, sizes: Sizes) -> None:
        settings = EngineConfig(
            device=device, weights="random", quantization=quantization, max_model_len=CONTEXT,
            kv_cache_bytes=CACHE_BYTES, graph_batch_size=0, max_batched_tokens=sizes.tokens,
            max_sequences=min(256, sizes.tokens - 1),
        )  # fmt: skip
        self.text, self._device, self._sizes, self._block = config.text, device, sizes, settings.block_size
        self.model = load_model(config, settings)
        self.runner = ModelRunner.of_model(self.model, settings, CONTEXT)

    def step(self, ask: Ask) -> ScheduledBatch:
        return step_of(self._prompts(ask, ask.prompt), ask.prompt, self._sizes.tokens, self._block)

    def _prompts(self, ask: Ask, tokens: int) -> Prompts:
        sizes = {"tokens": tokens, "picture_rows": ask.picture_rows}
        return Prompts(self.text.hidden_size, self.text.vocab_size, self._device, **sizes)

    def decode(self, ask: Ask) -> tuple[Lap, RecordedCalls]:
        """A decode step of answers that are half written as its graph, and the calls of the same."""
        batch = decode_of(self._prompts(ask, ask.prompt + ask.decoded // 2), ask, self._block)
        packed = self.runner._pack(batch)
        most_blocks = packed.table.blocks.shape[1]
        attention, sampled = self.runner._attention, self.runner._last_sampled
        graphs = DecodeGraphs(self.model, attention, [ask.together], most_blocks, sampled)
        with torch.inference_mode():
            graphs.capture()
            graphs.greedy(packed)  # its inputs stay
            with RecordedCalls() as calls:
                watch_step(calls, self.model, attention, decodes=True)
                graphs._run_greedy(ask.together)
        return partial(graphs.greedy, packed), calls

    def recorded(self, batch: ScheduledBatch) -> RecordedCalls:
        self.runner.launch(batch)  # compiles
        with RecordedCalls() as calls:
            watch_step(calls, self.model, self.runner._attention)
            self.runner.launch(batch)
        return calls


def account_of(
    calls: RecordedCalls, whole: Cost, repeater: Repeater, report: Report, known: Mapping[str, Cost]
) -> Account:
    """Measures the parts that are not ``known``, and prints all, with what is within them."""
    parts: dict[str, Cost] = {}
    within: dict[str, Cost] = {}
    for part, made in calls.parts().items():
        parts[part] = known.get(part) or repeater.recorded(made)
        report.row(part, parts[part], whole)
        inner = {} if part in known or part in ALONE else calls.within(part)
        for name, inside in inner.items():
            within[f"{part}/{name}"] = repeater.recorded(inside)
            report.row(f"  {part}/{name}", within[f"{part}/{name}"], whole)
    account = Account(parts, within, whole)
    report.row("whole", whole)
    joules, seconds = account.joules / whole.joules, account.seconds / whole.seconds
    print(f"the parts' sum is {joules:.1%} of its joules and {seconds:.1%} of its time")
    return account
