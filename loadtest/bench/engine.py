"""The engine alone on one GPU, in this process (`make bench NAME=engine`): InternVL3-8B's shape, random weights.

Requests are those of W1: 316 prompt tokens, 256 of them rows of a picture that are given, no two alike. Prefill and
decode are stepped here one by one; the loads w4a, w4b and w1 are closed loops around the same steps; `busy` is w1 under
the profiler; `fp8` is prefill by a second engine in FP8, in turns with one in bf16. Beside each figure stands its
ceiling on one H200.

    python loadtest/bench engine --parts prefill,decode --set max_batched_tokens=4096
    python loadtest/bench engine --quick --checkpoint build/default_model/checkpoint --set device=cpu
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import counting
import figures
import torch
from rich.console import Console
from rich.progress import Progress
from workloads import WORKLOADS

from bench.engine_load import PROMPT_TOKENS, ClosedLoop, Load, Prompts, decode_step_s, prefill_tokens_per_s
from bench.kernel_trace import Trace
from tessera.checkpoint.config import TextConfig
from tessera.engine.engine import Engine
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
# One H200, measured; for this shape in bf16.
PREFILL_TOKENS_S = 48_200.0
COPY_BYTES_S = 4.28e12

PARTS = ("prefill", "decode", "w4a", "w4b", "w1", "busy", "fp8")
GOALS = {
    "prefill.tokens_per_s": 46_000.0,
    "decode.b1.ms": 4.6,
    "decode.b10.ms": 4.9,
    "decode.b64.ms": 5.8,
    "w4a.tok_s": 7_800.0,
    "w4b.tok_s": 1_900.0,
    "gpu_busy": 0.97,
}
STARTUP_GOALS_S = {"warm": 15.0, "cold": 90.0}
FP8_PREFILL_GOAL = 1.5
LESS_IS_BETTER = ("s", "ms")
DECODE_TOKENS = 256
DECODE_SKIP = 100  # tokens before measuring: the context is then about 450
TRIM_S = 0.2
PAIR_BYTES = 60 << 30  # for each of two engines on one card

console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Shape:
    """A text model in numbers: parameters of its layers' and its head's matrices, and KV bytes a token, in bf16."""

    body: int
    head: int
    kv_bytes: int

    @classmethod
    def of(cls, text: TextConfig) -> Shape:
        queries, keys = (n * text.head_dim for n in (text.num_attention_heads, text.num_key_value_heads))
        attention = text.hidden_size * (2 * queries + 2 * keys)
        layer = attention + 3 * text.hidden_size * text.intermediate_size
        return cls(
            text.num_hidden_layers * layer, text.hidden_size * text.vocab_size, 2 * 2 * keys * text.num_hidden_layers
        )

    def decode_s(self, batch: int, context: int) -> float:
        """The least a decode step takes: every matrix and all keys and values once, at copy speed."""
        return (2 * (self.body + self.head) + batch * context * self.kv_bytes) / COPY_BYTES_S

    def tokens_per_s(self, load: Load) -> float:
        """The most a closed loop can give: prompts at the prefill ceiling, then the steps of `decode_s`."""
        prefill = load.concurrency * PROMPT_TOKENS / PREFILL_TOKENS_S
        decode = (load.max_tokens - 1) * self.decode_s(load.concurrency, PROMPT_TOKENS + load.max_tokens // 2)
        return load.concurrency * load.max_tokens / (prefill + decode)

    def ceilings(self) -> dict[str, float]:
        """The best each figure could be on one H200."""
        context = PROMPT_TOKENS + DECODE_SKIP + 32
        return {
            "prefill.tokens_per_s": PREFILL_TOKENS_S,
            "prefill.tflops": PREFILL_TOKENS_S * 2 * self.body / 1e12,
            **{f"decode.b{batch}.ms": 1e3 * self.decode_s(batch, context) for batch in (1, 10, 64)},
            "w4a.tok_s": self.tokens_per_s(standard_load("W4a")),
            "w4b.tok_s": self.tokens_per_s(standard_load("W4b")),
            # Its few decoded tokens ride along with other requests' prompts.
            "w1.req_s": PREFILL_TOKENS_S / (PROMPT_TOKENS + standard_load("W1").max_tokens - 1),
            "gpu_busy": 1.0,
        }


def standard_load(name: str, quick: bool = False) -> Load:
    """A standard workload as the engine sees it."""
    workload = WORKLOADS[name]
    if quick:
        return Load(workload.tokens, workload.concurrency, workload.concurrency, 2 * workload.concurrency)
    warm_up, requests = counting.warm_up(workload.concurrency), counting.ROUNDS * workload.concurrency
    return Load(workload.tokens, workload.concurrency, warm_up, requests)


@dataclass(frozen=True)
class Report:
    """Prints each figure twice: as a line to read on standard error, as JSON on standard output.

    Without ``ceilings`` goals do not apply either. Figures that are not for the ``record`` have names that begin with
    "trial.".
    """

    ceilings: dict[str, float]
    record: bool
    settings: list[str]

    def __call__(self, name: str, value: float, unit: str, goal: float | None = None, **notes: Any) -> None:
        ceiling = self.ceilings.get(name)
        words = f"{name:22} {value:12,.3f} {unit:10}"
        if ceiling:
            reached = ceiling / value if unit in LESS_IS_BETTER else value / ceiling
            words += f" ceiling {ceiling:10,.2f} ({reached:6.1%})"
        if self.ceilings and (goal := goal or GOALS.get(name)):
            met = value <= goal if unit in LESS_IS_BETTER else value >= goal
            words += f" goal {goal:g} {'met' if met else 'MISSED'}"
        console.print(words + "".join(f" {key}={note}" for key, note in notes.items()))
        full = name if name.startswith("quant.") else f"engine.{name}"
        figures.emit(
            full if self.record else f"trial.{full}",
            round(value, 4),
            unit,
            ceiling=None if ceiling is None else round(ceiling, 3),
            settings=self.settings,
            **notes,
        )


@dataclass(frozen=True)
class Bench:
    """The parts, each of which measures one thing and reports it."""

    engine: Engine
    prompts: Prompts
    config: EngineConfig
    shape: Shape
    report: Report
    quick: bool
    profile_to: Path | None

    def run(self, parts: list[str]) -> None:
        """Runs parts in the order of PARTS."""
        with Progress(console=console, transient=True, redirect_stdout=False) as progress:
            bar = progress.add_task("", total=len(parts))
            for part in (part for part in ("prefill", "decode") if part in parts):
                progress.update(bar, description=part)
                self._counted(part, self._prefill if part == "prefill" else self._decode)
                progress.advance(bar)
            loop = ClosedLoop(self.engine, self.prompts)
            for part in (part for part in PARTS[2:-1] if part in parts):
                progress.update(bar, description=part)
                self._counted(part, partial(self._closed_loop, part, loop))
                progress.advance(bar)

    def _counted(self, part: str, work: Callable[[], None]) -> None:
        """Does the work and prints what the engine counted meanwhile: prefix hits, preemptions, graph hits."""
        before = self.engine.metrics.snapshot()
        work()
        after = self.engine.metrics.snapshot()
        grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
        listed = ", ".join(f"{name} {count:+}" for name, count in grown.items())
        console.print(f"  {part} counted: {listed or 'nothing'}")

    def _prefill(self) -> None:
        repeats = 1 if self.quick else 3
        runs = [prefill(self.engine, self.prompts, self.config, self.quick) for _ in range(repeats)]
        rate, step = (median(column) for column in zip(*runs))
        self.report("prefill.tokens_per_s", rate, "tokens/s", step_tokens=round(step), repeats=repeats)
        self.report("prefill.tflops", rate * 2 * self.shape.body / 1e12, "TFLOP/s")

    def _decode(self) -> None:
        steps, repeats = (16, 1) if self.quick else (64, 3)
        for batch in (1, 10, 64):
            runs = [
                decode_step_s(self.engine, self.prompts, batch, DECODE_SKIP, steps, DECODE_TOKENS)
                for _ in range(repeats)
            ]
            slowest = max(max(run) for run in runs)
            middle = median(median(run) for run in runs)
            self.report(f"decode.b{batch}.ms", 1e3 * middle, "ms", slowest_ms=round(1e3 * slowest, 3), repeats=repeats)

    def _closed_loop(self, part: str, loop: ClosedLoop) -> None:
        if part == "busy":
            self._busy(loop)
            return
        load = standard_load(part.replace("w", "W"), self.quick)
        outcome = loop.measure(load)
        notes = {"requests": outcome.requests, "ttft_p50_ms": round(outcome.ttft_p50_ms, 1)}
        if part == "w1":
            self.report("w1.req_s", outcome.requests / outcome.seconds, "req/s", **notes)
        else:
            self.report(f"{part}.tok_s", outcome.tokens / outcome.seconds, "tok/s", **notes)

    def _busy(self, loop: ClosedLoop) -> None:
        if not self.config.device.startswith("cuda"):
            console.print("busy: left out, it needs a GPU")
            return
        load = standard_load("W1")
        load = Load(load.max_tokens, load.concurrency, load.warm_up, 192 if self.quick else 384)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities):  # the first one takes its time to begin
            torch.cuda.synchronize()
        watch = torch.profiler.profile(activities=activities)
        loop.measure(load, watch)
        trace = Trace.of_profile(watch, TRIM_S)
        text = trace.report()
        console.print(text, markup=False)
        if self.profile_to:
            self.profile_to.write_text(text)
        self.report("gpu_busy", trace.busy, "share", profiled_s=round(trace.seconds, 2))


def prefill(engine: Engine, prompts: Prompts, config: EngineConfig, quick: bool) -> tuple[float, float]:
    """Prompt tokens a second, and how many a step had."""
    warm_up, steps = (1, 4) if quick else (3, 12)
    return prefill_tokens_per_s(engine, prompts, warm_up, steps, config.max_batched_tokens, config.max_sequences)


def fp8_over_bf16(checkpoint: Path, config: EngineConfig, prompts: Prompts, report: Report, quick: bool) -> None:
    """Prefill in FP8 and in bf16 by two engines that take turns, as the clocks of one run do not hold for the next."""
    share = config.memory_bytes or PAIR_BYTES
    engines = {}
    for number, (kind, how) in enumerate({"fp8": "fp8", "bf16": "checkpoint"}.items(), 1):
        # An engine counts what its process holds, and the first one's share is in that.
        alone = replace(config, quantization=how, memory_bytes=number * share)
        engines[kind] = Engine.from_checkpoint(checkpoint, alone)
    rounds = [
        {kind: prefill(engine, prompts, config, quick)[0] for kind, engine in engines.items()}
        for _ in range(1 if quick else 3)
    ]
    ratio = median(rates["fp8"] / rates["bf16"] for rates in rounds)
    rates = [{kind: round(rate) for kind, rate in each.items()} for each in rounds]
    report("quant.fp8.prefill_ratio", ratio, "x", FP8_PREFILL_GOAL, tokens_per_s=rates)


def engine_config(settings: list[str]) -> EngineConfig:
    """What the bench asks for, overridden by ``NAME=VALUE`` settings; a VALUE is JSON or else a string."""
    values: dict[str, Any] = {"device": "cuda", "weights": "random"}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in {field.name for field in fields(EngineConfig)}:
            raise SystemExit(f"engine: EngineConfig has no field {name!r}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    config = EngineConfig(**values)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("engine: needs a GPU, and this machine has none; a trial without: --set device=cpu")
    return config


def compiled_kernels() -> int:
    """Kernels in triton's cache on disk; a start-up that finds none there compiles them."""
    home = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    return sum(1 for _ in Path(os.environ.get("TRITON_CACHE_DIR", home)).glob("*/*.cubin"))


def start(checkpoint: Path, config: EngineConfig, report: Report) -> Engine:
    """An engine that is ready; reports how long that took."""
    compiled = compiled_kernels()
    started = time.perf_counter()
    engine = Engine.from_checkpoint(checkpoint, config)
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    cache = "warm" if compiled else "cold"
    goal = STARTUP_GOALS_S[cache]
    report("startup_s", seconds, "s", goal, kernel_cache=cache, kernels_compiled=compiled_kernels() - compiled)
    return engine


def chosen_parts(text: str) -> list[str]:
    """Names from a list with commas, in the order of PARTS."""
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [part for part in PARTS if part in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=chosen_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; no figures for the record")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", dest="settings", help="of EngineConfig")
    parser.add_argument("--checkpoint", type=Path, default=SHAPE, help="another model; no figures for the record")
    # Where commands run on a lent GPU, OUT is the folder whose files come back.
    profile = Path(os.environ["OUT"], "profile.txt") if "OUT" in os.environ else None
    parser.add_argument("--profile", type=Path, default=profile, help="write the kernels' table here")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what the engine chose
    config = engine_config(arguments.settings)
    text = read_config(arguments.checkpoint).text
    shape = Shape.of(text)
    standard = arguments.checkpoint.resolve() == SHAPE and config.device.startswith("cuda")
    ceilings = shape.ceilings() if standard else {}
    listed = ", ".join(f"{name} {value:,.2f}" for name, value in ceilings.items())
    console.print(f"ceilings on one H200: {listed or 'not known for this model and machine'}")
    # Settings make other engines than the one whose figures are kept.
    report = Report(ceilings, standard and not arguments.quick and not arguments.settings, arguments.settings)
    prompts = Prompts(text.hidden_size, text.vocab_size, config.device)
    if arguments.parts != ["fp8"]:
        engine = start(arguments.checkpoint, config, report)
        Bench(engine, prompts, config, shape, report, arguments.quick, arguments.profile).run(arguments.parts)
        del engine
    if "fp8" in arguments.parts:
        torch.cuda.empty_cache()
        fp8_over_bf16(arguments.checkpoint, config, prompts, report, arguments.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
