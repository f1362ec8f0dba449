"""A vision tower alone on one GPU (`make bench NAME=vision`): random weights, in bf16 and in FP8 by turns.

Forwards as the encoder makes them, pixels on the device: of tiles for InternViT-300M, for Qwen2-VL's tower (`--shape
mineru25-shape`) of the pictures of W5a and W5b. Ceilings are of one H200: products at the speed of a large one, the
best attention, elementwise values at that of a copy. `vision.fp8.cosine` is that of the rows of both.

    python loadtest/bench vision
    python loadtest/bench vision --shape mineru25-shape
    python loadtest/bench vision --shape build/default_model/checkpoint --device cpu      a trial: `trial.vision.*`
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import figures
import torch
import torch.nn.functional as F

from tessera.models.registry import read_config
from tessera.settings.stages import VisionSettings
from tessera.vision.runner import Runner, make_runner

SHAPES = figures.ROOT / "loadtest" / "shapes"
KINDS = {"bf16": "checkpoint", "fp8": "fp8"}
TURNS = 3


@dataclass(frozen=True)
class Forward:
    """``pictures`` of ``side`` patches; 0: tiles. ``ceilings``: milliseconds in bf16 and FP8, of the whole forward of
    tiles, of each of the pictures."""

    name: str
    pictures: int
    side: int = 0
    ceilings: tuple[float | None, float | None] = (None, None)

    def figure(self, kind: str, ms: float) -> tuple[str, float]:
        """Its name and value."""
        if self.side:
            return f"{self.name}{'.fp8' * (kind == 'fp8')}.picture_ms", ms / self.pictures
        return f"{'fp8.' * (kind == 'fp8')}{self.name}.ms", ms


TILES = (Forward("tiles32", 32, 0, (40.345, None)), Forward("tiles8", 8), Forward("b1", 1, 0, (1.709, None)))
PAGE, PHOTO = (74, (23.8785, 19.6816)), (32, (2.3962, 1.6114))
PICTURES = (
    *(Forward("w5a", 5, *PAGE), Forward("w5b", 32, *PHOTO)),
    *(Forward("w5a.8", 8, *PAGE), Forward("w5a.1", 1, *PAGE), Forward("w5b.1", 1, *PHOTO)),
)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time from the end of one call to the end of the next; a GPU's calls are not waited for in between."""
    marks: list[Any] = []
    for _ in range(repeats + 3):
        call()
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
    if device.type == "cuda":
        torch.cuda.synchronize()
        return median(before.elapsed_time(after) for before, after in pairwise(marks[2:]))
    return 1e3 * median(after - before for before, after in pairwise(marks[2:]))


def drawn(runner: Runner, forward: Forward, device: torch.device) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Pixels, each unit of one level with fine noise on it, and the pictures' wires."""
    shape, count, wires = runner.tower.unit_shape, forward.pictures, []
    if forward.side:
        wires = [(1, forward.side, forward.side)] * count
        count *= (forward.side // shape[0]) ** 2
    torch.manual_seed(6)
    levels = torch.randint(0, 244, (count, *[1] * len(shape)), dtype=torch.uint8)
    return (levels + torch.randint(0, 12, (count, *shape), dtype=torch.uint8)).to(device), wires


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="internvl3-8b-shape", help="of loadtest/shapes, or a checkpoint's folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="FORWARD", help="by its name")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("vision: needs a GPU, and this machine has none; a trial without: --device cpu")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what was chosen
    folder = SHAPES / options.shape
    recorded = options.device == "cuda" and folder.exists()
    config, device = read_config(folder if folder.exists() else Path(options.shape)), torch.device(options.device)
    runners = {}
    for kind, quantization in KINDS.items():
        settings = VisionSettings(
            "graph" if device.type == "cuda" else "torch", 32, dtype="bfloat16", device=options.device,
            quantization=quantization, random_weights=True,
        )  # fmt: skip
        torch.manual_seed(0)
        runners[kind] = make_runner(config, settings)
    prefix = "vision." if recorded else "trial.vision."
    known = TILES if runners["bf16"].tower.splits else PICTURES
    forwards = [forward for forward in known if options.only is None or forward.name in options.only]
    for forward in forwards:
        given = drawn(runners["bf16"], forward, device)
        calls = {kind: partial(runner.run, *given) for kind, runner in runners.items()}
        turns = [
            {kind: milliseconds(call, device, options.repeats) for kind, call in calls.items()} for _ in range(TURNS)
        ]
        for kind, ceiling in zip(calls, forward.ceilings):
            name, value = forward.figure(kind, median(turn[kind] for turn in turns))
            figures.emit(prefix + name, round(value, 4), "ms", ceiling=ceiling if recorded else None)
        if forward is forwards[0]:
            cosines = F.cosine_similarity(*(call().double() for call in calls.values()), dim=-1)
            least = round(float(cosines.min()), 5)
            figures.emit(f"{prefix}fp8.cosine", round(float(cosines.mean()), 7), "cosine", ceiling=1, least=least)
    return 0
