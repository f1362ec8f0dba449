"""The vision encoder alone on one GPU (`make bench NAME=vision`): InternViT-300M, random weights.

Forwards of 32 tiles and of one, tiles on the device, against `transformers` with the same weights; rows against
transformers' in float32. Before that every part of a forward is measured by itself: their sum predicts the forward,
and the same work at the speed of one large matrix product and of a copy is its ceiling. After it the tower in FP8, by
turns with the same in bf16, and the cosine of their rows.

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
from tessera.kernels.tower_layers import (
    ATTENTIONS,
    gpu_kernels,
    linear_and_activate_in_place,
    linear_with_epilogue,
)
from tessera.kernels.tuning import graph_milliseconds
from tessera.models.internvl.vision import InternViT
from tessera.models.tower import load_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import serving_tower
from tessera.vision.torch_runner import GraphRunner, bucket_sizes

SHAPE = figures.ROOT / "loadtest" / "shapes" / "internvl3-8b-shape"
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
        figures.emit(metric, round(value, 7), unit, command="make bench NAME=vision", ceiling=ceiling, **notes)


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


# --- a forward's parts


@dataclass(frozen=True)
class Parts:
    """What a forward of some tiles consists of: milliseconds measured one by one, and work in numbers."""

    layers: int
    each_layer: dict[str, float]  # the fastest way of each part
    once: dict[str, float]
    product_flop: float
    elementwise_bytes: float

    @property
    def predicted_ms(self) -> float:
        return self.layers * sum(self.each_layer.values()) + sum(self.once.values())

    def ceiling_ms(self, product_tflops: float, copy_gb_s: float) -> float:
        """Products at the speed of a large one, the best attention, and each elementwise value moved at copy speed."""
        attention = self.layers * self.each_layer["attention"]
        return self.product_flop / product_tflops / 1e9 + attention + self.elementwise_bytes / copy_gb_s / 1e6


@torch.inference_mode()
def measure_parts(tower: InternViT, count: int) -> Parts:
    """Measures on a GPU and prints."""
    layer, projector = tower.blocks[0], tower.projector
    attention, mlp = layer.attention, layer.mlp
    kernels = gpu_kernels()
    weight = tower.class_embedding
    tokens, width = tower.position_embedding.shape[1], weight.shape[-1]

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=weight.dtype, device=weight.device)

    say(f"\nparts of a forward of {count} tiles, {count * tokens} rows")
    x, update, inner = (
        rows(count, tokens, width),
        rows(count, tokens, width),
        rows(count, tokens, mlp.linear2.in_features),
    )
    flop = 0.0

    def product(name: str, linear: torch.nn.Linear, given: torch.Tensor) -> float:
        nonlocal flop
        ms = graph_milliseconds(partial(linear, given))
        this = 2.0 * count * tokens * linear.weight.numel()
        flop += tower.depth * this
        say(f"  {name:34} {ms:8.4f} ms {this / ms / 1e9:6.0f} TFLOP/s")
        return ms

    each = {"qkv": product("qkv", attention.qkv, x)}
    query, key, value = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).unbind(2)
    attended = {}
    for name, attend in ATTENTIONS.items():
        try:
            attended[name] = graph_milliseconds(partial(attend, query, key, value))
        except RuntimeError as refusal:
            say(f"  attention {name:24} refused: {str(refusal)[:60]!r}")
            continue
        speed = 4 * count * tokens**2 * width / attended[name] / 1e9
        say(f"  attention {name:24} {attended[name]:8.4f} ms {speed:6.0f} TFLOP/s")
    each["attention"] = min(attended.values())
    each["output"] = product("output", attention.output, x)
    ways = {"apart": linear_and_activate_in_place, "epilogue": linear_with_epilogue}
    bare = product("linear1 without its activation", mlp.linear1, x)
    activated = {
        name: graph_milliseconds(partial(way, x, mlp.linear1, mlp.activation_name)) for name, way in ways.items()
    }
    for name, ms in activated.items():
        say(f"  linear1, {mlp.activation_name + ' ' + name:25} {ms:8.4f} ms {ms - bare:+.4f}")
    each["linear1"] = min(activated.values())
    each["linear2"] = product("linear2", mlp.linear2, inner)
    norm = graph_milliseconds(partial(kernels.add_and_norm, x, update, layer.norm1))
    say(f"  addition and norm{'':18} {norm:8.4f} ms {4 * x.nbytes / norm / 1e6:6.0f} GB/s")
    each["two norms"] = 2 * norm

    tiles = torch.randint(0, 256, (count, *tower.unit_shape), dtype=torch.uint8, device=weight.device)
    merged = rows(count, tower.grid**2, projector.linear1.in_features)
    once = {
        "embedding": graph_milliseconds(partial(tower.embed, tiles)),
        "projector": graph_milliseconds(partial(projector, merged, kernels)),
    }
    flop += 2.0 * count * (tokens - 1) * tower.patch_embedding.weight.numel()
    flop += 2.0 * count * tower.grid**2 * (projector.linear1.weight.numel() + projector.linear2.weight.numel())
    for name, ms in once.items():
        say(f"  {name:34} {ms:8.4f} ms")
    return Parts(tower.depth, each, once, flop, tower.depth * 2 * 4 * x.nbytes)


def machine_speeds() -> tuple[float, float]:
    """TFLOP/s of a bf16 product of two 8,192-square matrices, and GB/s of a copy, both directions counted."""
    a, b = torch.randn((2, 8192, 8192), dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    product = 2 * 8192**3 / graph_milliseconds(lambda: torch.mm(a, b, out=out)) / 1e9
    source, target = torch.empty((2, 1 << 30), dtype=torch.uint8, device="cuda")
    return product, 2 * source.numel() / graph_milliseconds(lambda: target.copy_(source)) / 1e6


# --- whole forwards


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
        ceilings = self.ceilings()
        tiles = torch.from_numpy(self.tiles).to(self.device)
        self.peer.model.to(self.device)
        exact = self.peer.rows_of(tiles)
        self.peer.model.to(torch.bfloat16)
        runner = self.runner(torch.bfloat16, len(tiles))
        self.speeds(runner, tiles, ceilings)
        if profile:
            self.profile(runner, tiles, profile_to)
        self.cosines(runner, tiles, exact)
        self.fp8(runner, tiles, profile_to and profile_to.with_stem("vision_fp8_profile"), profile)

    def ceilings(self) -> dict[int, dict[str, float]]:
        """(ceiling, prediction) in ms by number of tiles; nothing is known of a CPU."""
        if self.device.type == "cpu":
            return {}
        product, copy = machine_speeds()
        say(f"{torch.cuda.get_device_name()}: bf16 product {product:.0f} TFLOP/s, copy {copy:.0f} GB/s")
        tower = load_tower(self.config, torch.bfloat16).to(self.device)
        found = {}
        for count in (len(self.tiles), 1):
            parts = measure_parts(tower, count)
            found[count] = {
                "ceiling": round(parts.ceiling_ms(product, copy), 3),
                "predicted_ms": round(parts.predicted_ms, 3),
            }
            say(f"  predicted {found[count]['predicted_ms']} ms, ceiling {found[count]['ceiling']} ms")
        return found

    def speeds(self, runner: GraphRunner, tiles: torch.Tensor, ceilings: dict[int, dict[str, float]]) -> None:
        implementation = self.peer.model.config._attn_implementation
        values = self.peer.values(tiles)
        for count, name in ((len(tiles), f"tiles{len(tiles)}"), (1, "b1")):
            ours = milliseconds(lambda: runner.run(tiles[:count]), self.device, self.repeats)  # noqa: B023
            from_host = milliseconds(lambda: runner.run(self.tiles[:count]), self.device, self.repeats)  # noqa: B023
            theirs = milliseconds(lambda: self.peer.rows(values[:count]), self.device, self.repeats)  # noqa: B023
            notes: dict[str, Any] = dict(ceilings.get(count, {}))
            notes |= {"from_host_ms": round(from_host, 3), "transformers_ms": round(theirs, 3)}
            self.report(f"{name}.ms", ours, "ms", notes.pop("ceiling", None), **notes)
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
