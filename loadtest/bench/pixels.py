"""Large pictures decoded and cut by the CPU and by the GPU, served (`make bench NAME=pixels`; docs/preprocessing.md).

Two servers share the GPU and are asked in turns, one with `gpu_pixels` 0, the other with 1: every picture of the sizes
of W1 and W3 (1080p), W8a (4K) and W8b (8K), in InternVL's 12-tile cut or, for shapes of native resolution, as large as
their `max_pixels` allows. The second wants `nvidia-nvimgcodec-cu13` installed.

    python loadtest/bench pixels                                                       MinerU2.5's shape
    python loadtest/bench pixels --checkpoint loadtest/shapes/internvl3-8b-shape       12 tiles
    python loadtest/bench pixels --checkpoint loadtest/shapes/qwen3-vl-8b --workloads W8a W8b --concurrency 4 \\
        --turns 2 --set vision_encoder.cache_bytes=0        of 16,320 tokens: two caches more do not fit an H200
    python loadtest/bench pixels --gpus "" --workloads W1 W8a --concurrency 2 --turns 2     a trial: both on the CPU

Figures: `seeds.pixels.<workload>.<shape>.<way>.req_s` and `.p99_ms`, `.gpu_over_cpu`, and
`preprocess.gpu_crossover_pixels`: the size from which on the GPU is faster for sure, 0 is never. On an H200 a run of 32
in flight takes 10 to 20 s: the default four sizes, three turns and two ways seven minutes.
"""

import argparse
import random
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace

import figures
from serving import DEFAULT_CHECKPOINT, add_arguments, serve, setup, setup_notes
from turns import Ratio, in_turns, report_ratio, report_way
from workloads import WORKLOADS, shape_name

SHAPE = figures.ROOT / "loadtest" / "shapes" / "mineru25-shape"
WAYS = {"cpu": "0", "gpu": "1"}
MEMORY = 0.45
"""Of the GPU, for each server."""


def crossover(found: Iterable[tuple[int, Ratio]]) -> int:
    """The fewest pixels from which on, among these sizes, the GPU is faster for sure; 0: not even with the most."""
    least = 0
    for pixels, over_cpu in sorted(found, reverse=True):
        if not over_cpu.sure:
            break
        least = pixels
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(checkpoint=None)
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["W1", "W3", "W8a", "W8b"])
    parser.add_argument("--concurrency", type=int, default=WORKLOADS["W8a"].concurrency)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=6, help="of the load generator")
    options = parser.parse_args()
    if options.checkpoint is None:
        options.checkpoint = SHAPE if options.gpus else DEFAULT_CHECKPOINT
    shaped = options.checkpoint.resolve().parent == SHAPE.parent
    asked = replace(setup(options), random_weights=shaped)
    shape, prefix = shape_name(options.checkpoint), "" if shaped and asked.gpus else "trial."
    about = {"concurrency": options.concurrency, "shape": shape, **setup_notes(options)}
    minutes = 1 + len(options.workloads) * options.turns * len(WAYS) * 15 / 60
    print(f"about {minutes:.0f} minutes on an H200", file=sys.stderr, flush=True)
    found = []
    with ExitStack() as stack:
        ways = {}
        for way, least in WAYS.items():
            own = {"gpu_pixels": least, "gpu_memory": str(MEMORY)} if asked.gpus else {}
            ways[way] = stack.enter_context(serve(replace(asked, settings={**asked.settings, **own}))).grpc
            print(f"the server {way} is ready", file=sys.stderr, flush=True)
        seed = random.randrange(1 << 20)
        for number, name in enumerate(options.workloads):
            workload = replace(WORKLOADS[name], concurrency=options.concurrency)
            runs = in_turns(ways, workload, options.turns, options.processes, seed + 1000 * number)
            figure = f"{prefix}seeds.pixels.{name}.{shape}"
            for way, taken in runs.items():
                report_way(f"{figure}.{way}", taken, **about)
            over_cpu = report_ratio(f"{figure}.gpu_over_cpu", runs["gpu"], runs["cpu"], **about)
            found.append((workload.width * workload.height, over_cpu))
    ratios = {pixels: [round(part, 4) for part in over_cpu] for pixels, over_cpu in found}
    figures.emit(f"{prefix}preprocess.gpu_crossover_pixels", crossover(found), "pixels", ratios=ratios, **about)
    return 0
