"""`make bench-dispatch`: what the sizes of the vision stage's forwards and of its sending groups do to W1.

Starts the real server anew for each pair of visual_infer_batch_size and visual_send_batch_size, and prints for each
requests a second, p50 and p99 of whole requests, and the prompts that began together in a step of the language model.

    python loadtest/bench_dispatch.py --gpu 0 --checkpoint loadtest/shapes/internvl3-8b-shape --weights random
    python loadtest/bench_dispatch.py --concurrency 4 --pairs 1,1 8,8        (a trial without a GPU)
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import bench_serve
import figures
from workloads import WORKLOADS, Workload

COMMAND = "make bench-dispatch"
PAIRS = ((1, 1), (1, 8), (8, 8), (32, 1))


def pair(text: str) -> tuple[int, int]:
    """ "INFER,SEND" as numbers."""
    infer, send = text.split(",")
    return int(infer), int(send)


def prefill_batch(before: dict[str, float], after: dict[str, float]) -> float:
    """Prompts that began in a step, in the mean over the steps in which one did."""
    prompts, steps = (after[name] - before[name] for name in ("tessera_prompts_total", "tessera_prefill_steps_total"))
    return prompts / max(1.0, steps)


def run(workload: Workload, infer: int, send: int, settings: dict[str, str], gpus: list[str], processes: int) -> None:
    """Measures one pair on a server of its own and emits its figures."""
    sizes = {"visual_infer_batch_size": infer, "visual_send_batch_size": send}
    own = settings | {f"vision_encoder.{name}": str(size) for name, size in sizes.items()}
    with bench_serve.running(own, {"preprocess": processes} if gpus else {}, gpus) as (server,):
        before = bench_serve.counters(server.metrics_url)
        answers, _ = bench_serve.measure([server.grpc_url], workload, min(processes, workload.concurrency))
        together = prefill_batch(before, bench_serve.counters(server.metrics_url))
    rate = (len(answers) - 1) / (answers[-1].ended - answers[0].ended)
    spent = bench_serve.latencies(answers)
    notes = {"requests": len(answers), "concurrency": workload.concurrency, **sizes}
    name = f"dispatch.{workload.name}.{infer}_{send}"
    figures.emit(f"{name}.req_s", round(rate, 2), "req/s", COMMAND, **notes)
    figures.emit(f"{name}.p50_ms", spent["p50_ms"], "ms", COMMAND, **notes)
    figures.emit(f"{name}.p99_ms", spent["p99_ms"], "ms", COMMAND, **notes)
    figures.emit(f"{name}.prefill_batch", round(together, 2), "prompts/step", COMMAND, **notes)
    print(
        f"infer {infer:2}, send {send:2}: {rate:7.2f} req/s, p50 {spent['p50_ms']:8.1f} ms, "
        f"p99 {spent['p99_ms']:8.1f} ms, {together:5.2f} prompts a step",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="", help="its number; without one the CPU's settings are used")
    parser.add_argument("--checkpoint", type=Path, default=figures.ROOT / "build" / "default_model" / "checkpoint")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--pairs", nargs="+", type=pair, default=PAIRS, metavar="INFER,SEND")
    parser.add_argument("--concurrency", type=int, help="128 on a GPU, else 8; 7.5 times as many requests are made")
    parser.add_argument("--processes", type=int, default=6, help="of the load generator, and of preprocess on a GPU")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODEL.PARAMETER=VALUE", dest="parameters")
    arguments = parser.parse_args()
    gpus = [arguments.gpu] if arguments.gpu else []
    settings = bench_serve.gpu_settings(arguments.checkpoint.resolve(), arguments.weights) if gpus else {}
    settings |= dict(setting.split("=", 1) for setting in arguments.parameters)
    workload = replace(WORKLOADS["W1"], concurrency=arguments.concurrency or (128 if gpus else 8))
    for infer, send in arguments.pairs:
        run(workload, infer, send, settings, gpus, arguments.processes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
