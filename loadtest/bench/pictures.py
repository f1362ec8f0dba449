"""Qwen2-VL's tower alone on one GPU (`make bench NAME=pictures`): MinerU2.5's shape, random weights, bf16 and FP8.

Forwards of pictures of one size as the encoder makes them of W5a and W5b, and of one picture, pixels on the device;
milliseconds a picture, with the share of them that products and attention would take at the speeds of ceilings.

    python loadtest/bench pictures --profile
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import partial

import figures
import torch
import torch.nn.functional as F

from bench.kernel_trace import Trace
from bench.vision import milliseconds, say
from tessera.models.registry import read_config
from tessera.settings.stages import VisionSettings
from tessera.vision.torch_runner import TorchRunner

SHAPE = figures.ROOT / "loadtest" / "shapes" / "mineru25-shape"
#: (name, patches along a side, pictures)
FORWARDS = [("w5a", 74, 5), ("w5b", 32, 32), ("w5a.8", 74, 8), ("w5a.1", 74, 1), ("w5b.1", 32, 1)]
PROFILED = ("w5a", "w5b", "w5b.1")
# TFLOP/s of products in bf16 and FP8, and of attention, which only the readers' eye is given as a measure.
PRODUCTS, ATTENTION = {"checkpoint": 680.0, "fp8": 1150.0}, 361.0


def work(side: int) -> tuple[float, float]:
    """TFLOP of a picture's products and of its attention."""
    vision = read_config(SHAPE).vision
    hidden, merged = vision.embed_dim, vision.embed_dim * vision.spatial_merge_size**2
    layer = (4 + 2 * vision.mlp_ratio) * hidden**2
    row = merged * (merged + vision.hidden_size) / vision.spatial_merge_size**2
    products = 2 * side**2 * (vision.depth * layer + 3 * vision.patch_size**2 * hidden + row)
    return products / 1e12, 4 * side**4 * hidden * vision.depth / 1e12


def pictures(runner: TorchRunner, side: int, count: int) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Smooth random fields on the device, and their wires."""
    torch.manual_seed(side)
    units = count * (side // runner.tower.unit_shape[0]) ** 2
    coarse = torch.rand(units, 3, 2, 2, device=runner.device)
    smooth = F.interpolate(coarse, size=(28, 28), mode="bilinear").mul(255).to(torch.uint8)
    groups = smooth.unflatten(2, (2, 14)).unflatten(4, (2, 14)).permute(0, 2, 4, 3, 5, 1).contiguous()
    return groups, [(1, side, side)] * count


def measure(quantization: str, profile: bool) -> None:
    settings = VisionSettings(
        "graph", 32, dtype="bfloat16", device="cuda", quantization=quantization, random_weights=True
    )
    runner = TorchRunner.from_checkpoint(read_config(SHAPE), settings)
    label = ".fp8" * (quantization == "fp8")
    for name, side, count in FORWARDS:
        given = pictures(runner, side, count)
        ms = milliseconds(partial(runner.run, *given), runner.device, 8) / count
        products, attention = work(side)
        ideal = products / PRODUCTS[quantization] * 1e3 + attention / ATTENTION * 1e3
        speed = f"{ms:7.3f} ms a picture, {1e3 / ms:6.1f} a second, ideal {ideal:.3f}"
        say(f"{name + label:12} {count:2} x {side**2}: {speed}")
        figures.emit(f"vision.{name}{label}.picture_ms", round(ms, 4), "ms", ceiling=round(ideal, 4), pictures=count)
        if profile and name in PROFILED:
            show_kernels(runner, given)
    groups, wires = pictures(runner, 40, 2)
    wires = [wires[0], (1, 20, 40), (1, 20, 40)]
    with torch.inference_mode():
        cosines = F.cosine_similarity(runner.run(groups, wires).double(), runner.tower(groups, wires).double(), dim=-1)
    say(f"cosine with the tower's plain forward: {float(cosines.mean()):.6f}, least {float(cosines.min()):.6f}")


def show_kernels(runner: TorchRunner, given: Sequence[object]) -> None:
    """Where the time of a forward goes."""
    watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with watch:
        runner.run(*given)
        torch.cuda.synchronize()
    say(Trace.of_profile(watch, 0.0).report(kernels=12, gaps=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="the kernels of a forward")
    parser.add_argument("--only", choices=tuple(PRODUCTS), help="the weights' kind; default: both")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("pictures: needs a GPU, and this machine has none")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)  # what was chosen
    for quantization in [arguments.only] if arguments.only else PRODUCTS:
        measure(quantization, arguments.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
