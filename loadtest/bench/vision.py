"""The vision encoder alone on one GPU (`make bench NAME=vision`): InternViT-300M, random weights.

Forwards of 32 tiles and of one, tiles on the device, against `transformers` with the same weights; rows against
transformers' in float32. Then the tower in FP8, by turns with the same in bf16, and the cosine of their rows.

    python loadtest/bench vision --profile
    python loadtest/bench vision --device cpu --tiles 2 --quick --checkpoint build/default_model/checkpoint
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import figures
import numpy as np
import torch
import torch.nn.functional as F

from bench.kernel_trace import Trace
from bench.vision_peer import Peer, load_peer
from tessera.checkpoint.config import CheckpointConfig
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower
from tessera.vision.torch_runner import GraphRunner, bucket_sizes

SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
CEILINGS = {"tiles32": 40.345, "b1": 1.709}
"""Milliseconds on one H200 in bf16: products at the speed of a large one, the best attention, and elementwise values at
that of a copy. Measured part by part at 2e561c7, where the parts' sum predicted 42.6 and 3.8 ms."""
GOALS = {"tiles32.ms": 50.0, "fp8.tiles32.ms": 38.0, "b1.ms": 3.2, "b1.over_transformers": 0.75}
LEAST = {"cosine_bf16": 0.999, "fp8.cosine": 0.99, "cosine_fp32": 0.99999}

Call = Callable[[], object]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Report:
    """A figure as words and as JSON; the names of those not for the record begin with "trial."."""

    record: bool

    def __call__(self, name: str, value: float, unit: str, ceiling: float | None = None, **notes: Any) -> None:
        words = f"{name:22} {value:10.5g} {unit:8}" + (f" ceiling {ceiling:.4g}" if ceiling else "")
        if self.record and name in GOALS:
            words += f" goal {GOALS[name]:g} {'met' if value <= GOALS[name] else 'MISSED'}"
        if self.record and name in LEAST:
            words += f" goal {LEAST[name]:g} {'met' if value >= LEAST[name] else 'MISSED'}"
        say(words + "".join(f" {key}={note}" for key, note in notes.items()))
        metric = f"vision.{name}" if self.record else f"trial.vision.{name}"
        figures.emit(metric, round(value, 7), unit, ceiling=ceiling, **notes)


def milliseconds(call: Call, device: torch.device, repeats: int) -> float:
    """The median time from the end of one call to the end of the next; a GPU's calls are not waited for in between."""
    for _ in range(3):
        call()
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
        return median(times)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in pairwise(marks))


def sample_tiles(count: int, side: int) -> np.ndarray:
    """uint8 [count, side, side, 3]: smooth random fields, every fourth one noise."""
    generator = torch.Generator().manual_seed(6)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    smooth = F.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1) * 255
    tiles = smooth.permute(0, 2, 3, 1).to(torch.uint8).contiguous()
    tiles[::4] = torch.randint(0, 256, tiles[::4].shape, generator=generator, dtype=torch.uint8)
    return tiles.numpy()


def least_cosine(rows: torch.Tensor, expected: torch.Tensor) -> float:
    both = (each.double().flatten(0, -2) for each in (rows, expected))
    return float(F.cosine_similarity(*both, dim=-1).min())


@dataclass(frozen=True)
class Bench:
    config: CheckpointConfig
    peer: Peer
    device: torch.device
    report: Report
    tiles: np.ndarray
    repeats: int

    def runner(self, dtype: torch.dtype, largest: int, quantization: str = "checkpoint") -> GraphRunner:
        """As the server starts it; on the CPU, where nothing is recorded, with plain kernels."""
        name, kind = str(dtype).removeprefix("torch."), "graph" if self.device.type == "cuda" else "torch"
        settings = VisionSettings(kind, largest, dtype=name, device=self.device.type, quantization=quantization)
        if self.device.type == "cuda":
            return GraphRunner.from_checkpoint(self.config, settings)
        return GraphRunner(serving_tower(self.config, settings), bucket_sizes(largest))

    def run(self, profile_to: Path | None, profile: bool) -> None:
        tiles = torch.from_numpy(self.tiles).to(self.device)
        self.peer.model.to(self.device)
        exact = self.peer.rows_of(tiles)
        self.peer.model.to(torch.bfloat16)
        runner = self.runner(torch.bfloat16, len(tiles))
        self.speeds(runner, tiles)
        if profile:
            self.profile(runner, tiles, profile_to)
        self.cosines(runner, tiles, exact)
        self.fp8(runner, tiles, profile_to and profile_to.with_stem("vision_fp8_profile"), profile)

    def speeds(self, runner: GraphRunner, tiles: torch.Tensor) -> None:
        implementation = self.peer.model.config._attn_implementation
        values = self.peer.values(tiles)
        for count, name in ((len(tiles), f"tiles{len(tiles)}"), (1, "b1")):
            ours = milliseconds(lambda: runner.run(tiles[:count]), self.device, self.repeats)  # noqa: B023
            from_host = milliseconds(lambda: runner.run(self.tiles[:count]), self.device, self.repeats)  # noqa: B023
            theirs = milliseconds(lambda: self.peer.rows(values[:count]), self.device, self.repeats)  # noqa: B023
            notes = {"from_host_ms": round(from_host, 3), "transformers_ms": round(theirs, 3)}
            self.report(f"{name}.ms", ours, "ms", CEILINGS.get(name) if self.report.record else None, **notes)
            self.report(f"{name}.over_transformers", ours / theirs, "ratio", attention=implementation)

    def cosines(self, runner: GraphRunner, tiles: torch.Tensor, exact: torch.Tensor) -> None:
        """The least cosine of a row of the largest forward, of forwards of single tiles, and of some in float32."""
        few = tiles[:8]
        alone = torch.cat([runner.run(tile[None]) for tile in few])
        cosine = min(least_cosine(runner.run(tiles), exact), least_cosine(alone, exact[: len(few)]))
        theirs = least_cosine(self.peer.rows_of(tiles), exact)
        self.report("cosine_bf16", cosine, "cosine", 1.0, transformers_bf16=round(theirs, 7), tiles=len(tiles))
        wide = self.runner(torch.float32, len(few)).run(few)
        self.report("cosine_fp32", least_cosine(wide, exact[: len(few)]), "cosine", 1.0, tiles=len(few))

    def fp8(self, plain: GraphRunner, tiles: torch.Tensor, profile_to: Path | None, profile: bool) -> None:
        """The tower in FP8, by turns with the unquantized one."""
        quantized = self.runner(torch.bfloat16, len(tiles), "fp8")
        for count in sorted({len(tiles), min(8, len(tiles)), 1}, reverse=True):
            times: dict[GraphRunner, list[float]] = {quantized: [], plain: []}
            for runner in (*times, *times, *times):
                times[runner].append(milliseconds(partial(runner.run, tiles[:count]), self.device, self.repeats))
            fp8, bf16 = map(median, times.values())
            self.report(f"fp8.tiles{count}.ms", fp8, "ms", bf16_ms=round(bf16, 3))
        if profile:
            self.profile(quantized, tiles, profile_to)
        both = (runner.run(tiles).double() for runner in (quantized, plain))
        cosines = F.cosine_similarity(*both, dim=-1)
        self.report("fp8.cosine", float(cosines.mean()), "cosine", 1.0, least=round(float(cosines.min()), 5))

    def profile(self, runner: GraphRunner, tiles: torch.Tensor, to: Path | None) -> None:
        """The kernels of three forwards of each size."""
        if self.device.type == "cpu":
            say("--profile: left out, it needs a GPU")
            return
        texts = []
        for count in (len(tiles), 1):
            watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            runner.run(tiles[:count])
            torch.cuda.synchronize()
            with watch:
                for _ in range(3):
                    runner.run(tiles[:count])
                torch.cuda.synchronize()
            texts.append(f"three forwards of {count} tiles\n{Trace.of_profile(watch, 0.0).report(kernels=24)}")
            say("\n" + texts[-1])
        if to:
            to.write_text("\n".join(texts))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=SHAPE, help="another model; no figures for the record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiles", type=int, default=32, help="of the large forward")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; no figures for the record")
    parser.add_argument(
        "--profile", action="store_true", help="the kernels of a forward; $OUT, a folder, gets them too"
    )
    arguments = parser.parse_args(given)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("vision: needs a GPU, and this machine has none; a trial without: --device cpu")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what was chosen
    torch.backends.cudnn.allow_tf32 = False  # or transformers' patch embedding would not be float32
    standard = arguments.checkpoint.resolve() == SHAPE and arguments.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        peer, config = load_peer(arguments.checkpoint, Path(folder))
        Bench(
            config,
            peer,
            torch.device(arguments.device),
            Report(standard and not arguments.quick),
            sample_tiles(arguments.tiles, config.vision.image_size),
            3 if arguments.quick else 30,
        ).run(Path(os.environ["OUT"], "vision_profile.txt") if "OUT" in os.environ else None, arguments.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
