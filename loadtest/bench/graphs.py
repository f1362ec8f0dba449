"""A decode step and a forward of one tile with CUDA graphs and without (`make bench NAME=graphs`): milliseconds a step,
launches a step, and a picture of what ran in 50 ms.

The same kernels, launched one by one or by a graph, in turns: decode steps of 1, 10 and 64 sequences, with contexts of
some 450 to 800 tokens, and the vision tower. `engine.graphs.<work>.ms` and `.launches` are with graphs, `.eager_ms` and
`.eager_launches` without, `.eager_over_graphs` the ratio of the times. `seeds.timeline` is the share of a step in which
a kernel runs, decoding one sequence with graphs; the notes have the others. It is a step's kernels by the profiler over
its time without, since the profiler makes launches slower. The picture shows what the profiler saw.

    python loadtest/bench graphs                                                writes docs/graphs_timeline.svg
    python loadtest/bench graphs --checkpoint build/default_model/checkpoint --set device=cpu --picture trial.svg
                                     a trial without a GPU: no graphs, operators in place of kernels, `trial.*`

On an H200 all of it takes about three minutes, most of which is the start of InternVL3-8B's shape.
"""

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import figures
import torch
from turns import ratio
from workloads import WORKLOADS

from bench.account import Prompts, check, prepare
from bench.timeline import WINDOW_MS, Trace, picture
from tessera.checkpoint.config import CheckpointConfig
from tessera.engine.engine import Engine
from tessera.models.registry import read_config
from tessera.preprocess.preprocessor import Preprocessor
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.runner import make_runner

SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
PICTURE = figures.ROOT / "docs" / "graphs_timeline.svg"
BATCHES = (1, 10, 64)
TURNS, STEPS, SETTLE = 6, 16, 2
DECODE_SKIP = 100  # tokens before measuring
MOST_TRACED = 60
AHEAD = 32  # tokens by which the first of a batch may be before the last
MOST_TOKENS = 2 * TURNS * (SETTLE + STEPS) + 2 * (SETTLE + MOST_TRACED) + DECODE_SKIP + AHEAD


@dataclass(frozen=True)
class Work:
    """``run`` does this many steps, to their end; inside of ``eager`` none of them is a graph. ``drawn``: what the
    picture calls it."""

    name: str
    run: Callable[[int], None]
    eager: Callable[[], AbstractContextManager[None]]
    drawn: str = ""


@dataclass(frozen=True)
class Measured:
    """Of one way: the milliseconds of a step by turns, and a trace of ``steps``."""

    ms: list[float]
    trace: Trace
    steps: int

    @property
    def launches(self) -> float:
        return self.trace.launches / self.steps

    @property
    def share(self) -> float:
        """Of a step's time in which a kernel runs."""
        return min(1.0, self.trace.busy_ms / self.steps / median(self.ms))


def measure(work: Work) -> tuple[Measured, Measured]:
    """With graphs and without."""
    ways = (nullcontext, work.eager)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for way, times in zip(ways, taken):
            with way():
                work.run(SETTLE)  # the first was launched the other way
                began = time.perf_counter()
                work.run(STEPS)
                times.append(1e3 * (time.perf_counter() - began) / STEPS)
    measured = []
    for way, times in zip(ways, taken):
        steps = min(MOST_TRACED, math.ceil(1.5 * WINDOW_MS / median(times)))
        with way():
            work.run(SETTLE)
            measured.append(Measured(times, Trace.of(lambda steps=steps: work.run(steps)), steps))
    return measured[0], measured[1]


@contextmanager
def emptied(holder: Any, *names: str) -> Iterator[None]:
    """These attributes of the holder are None, or empty, meanwhile."""
    kept = {name: getattr(holder, name) for name in names}
    for name, value in kept.items():
        setattr(holder, name, {} if isinstance(value, dict) else None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(holder, name, value)


def one_tile(config: CheckpointConfig, device: torch.device) -> Work:
    """Forwards of the tower."""
    on_gpu = device.type == "cuda"
    settings = VisionSettings("torch", device=device.type, random_weights=True)
    if on_gpu:
        settings = VisionSettings("graph", 16, dtype="bfloat16", device=device.type, random_weights=True)
    runner = make_runner(config, settings)
    if not runner.tower.splits:
        raise SystemExit("graphs: wants a tower of tiles")
    pixels = torch.randint(0, 256, (1, *runner.tower.unit_shape), dtype=torch.uint8, device=device)

    def run(steps: int) -> None:
        for _ in range(steps):
            runner.run(pixels)
        if on_gpu:
            torch.cuda.synchronize()

    pool: Any = getattr(runner, "_graphs", None)
    return Work("vit", run, (lambda: emptied(pool, "_graphs")) if on_gpu else nullcontext, "ViT, one tile")


@contextmanager
def decoding(engine: Engine, prompts: Prompts, batch: int) -> Iterator[Work]:
    """Steps of a batch that has its prompts behind it."""
    requests = [prompts.request(MOST_TOKENS) for _ in range(batch)]
    for request in requests:
        engine.submit(request)
    tokens = 0
    while tokens < DECODE_SKIP * batch:
        progress = engine.step()
        check(progress)
        tokens += len(progress.tokens)

    def run(steps: int) -> None:
        while steps:
            if (got := len(engine.step().tokens)) not in (0, batch) or not engine.has_work():
                raise RuntimeError(f"a step of {batch} decoding requests gave {got} tokens")
            steps -= got > 0

    eager = lambda: emptied(engine._runner, "_graphs", "_prompt_graphs")  # noqa: E731
    drawn = "decode, one sequence" if batch == 1 else ""
    yield Work(f"b{batch}", run, eager, drawn)
    for request in requests:
        engine.cancel(request.number)
    while engine.has_work():
        engine.step()


def engine_config(settings: list[str]) -> EngineConfig:
    """What the bench asks for, overridden by ``NAME=VALUE`` settings; a VALUE is JSON or else a string."""
    values: dict[str, Any] = {"device": "cuda", "weights": "random"}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in {field.name for field in fields(EngineConfig)}:
            raise SystemExit(f"graphs: EngineConfig has no field {name!r}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    config = EngineConfig(**values)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("graphs: needs a GPU, and this machine has none; a trial without: --set device=cpu")
    return config


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=SHAPE)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", dest="settings", help="of EngineConfig")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what the engine chose
    language, config = engine_config(options.settings), read_config(options.checkpoint)
    print("about three minutes on an H200", file=sys.stderr, flush=True)
    device = torch.device(language.device)
    recorded = options.checkpoint.resolve() == SHAPE and device.type == "cuda" and not options.settings
    prefix = "" if recorded else "trial."
    Trace.of(lambda: None)  # the first one takes its time to begin
    rows: dict[str, Trace] = {}
    shares: dict[str, float] = {}

    def report(work: Work) -> None:
        graphs, eager = measure(work)
        over = ratio(eager.ms, graphs.ms)
        for way, each in (("", graphs), ("eager_", eager)):
            name = f"{prefix}engine.graphs.{work.name}.{way}"
            figures.emit(f"{name}ms", round(median(each.ms), 4), "ms", busy=round(each.share, 3))
            figures.emit(f"{name}launches", round(each.launches, 1), "launches", steps=each.steps)
        name = f"{prefix}engine.graphs.{work.name}.eager_over_graphs"
        figures.emit(name, round(over.value, 4), "ratio", ci95=round(over.ci95, 4), turns=TURNS)
        for title, each in (("without graphs", eager), ("with graphs", graphs)) if work.drawn else ():
            told = f"{median(each.ms):.2f} ms and {each.launches:.0f} launches a step"
            rows[f"{work.drawn}, {title}: {told}, a kernel runs {each.share:.0%} of it"] = each.trace.window()
            shares[f"{work.name} {title}"] = round(each.share, 3)

    report(one_tile(config, device))  # it is gone when the engine takes what is left of the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine.from_checkpoint(options.checkpoint, language)
    prepared = prepare(Preprocessor.from_checkpoint(options.checkpoint), WORKLOADS["W1"])
    prompts = Prompts(prepared, config, language.device)
    for batch in options.batches:
        with decoding(engine, prompts, batch) as work:
            report(work)
    if "b1 with graphs" in shares:
        figures.emit(f"{prefix}seeds.timeline", shares["b1 with graphs"], "share", shares=shares)
    if file := options.picture or (PICTURE if recorded else None):
        file.write_text(picture(rows, f"{WINDOW_MS:g} ms on {figures.machine()}, under the profiler"))
    return 0
