"""Questions of people beside a batch job that fills the server: what they wait for their first token, and what the job
loses (docs/gpu.md).

    python loadtest/bench jobs --gpus 0 --weights random --checkpoint loadtest/shapes/internvl3-8b-shape \\
        --instances preprocess=10

The job is W1 in a closed loop; the questions are W1's own, streamed, two a second at random times. Three runs on one
server: the job alone, then at priority 10 with questions at 0, and alone again. The loss is that of the second run
against the mean of the others, the questions' own cost included. Exit code 1 where a figure misses its bar.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import counting
import figures
from closed_loop import Answered
from measuring import Taken, stage_names, take
from serving import Running, add_arguments, serve, setup, setup_notes
from targets import TesseraAsker
from workloads import WORKLOADS

JOB_PRIORITY = 10
QUESTIONS_S = 2.0
BARS = {"ttft_p50_ms": 250.0, "ttft_p99_ms": 500.0, "loss_pct": 3.0}


@contextmanager
def questions(asker: TesseraAsker, rate: float) -> Iterator[list[Answered]]:
    """This many a second at random times while the context lasts, in it and afterwards all that were answered.

    Raises what went wrong with one of them.
    """
    answered: list[Answered] = []
    ended, dice, pictures = threading.Event(), random.Random(asker.seed), asker.pictures(0, 0)
    workload = asker.workload

    def ask_one() -> None:
        picture, began = pictures.deal(), time.perf_counter()
        answered.append(Answered.of(ask(picture, workload, workload.prompts[0]), began))

    def ask_all() -> None:
        with ThreadPoolExecutor(64) as pool:
            asked = []
            while not ended.wait(dice.expovariate(rate)):
                asked.append(pool.submit(ask_one))
            for each in asked:
                each.result()

    with asker.connection() as ask, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all)
        try:
            yield answered
        finally:
            ended.set()
        asking.result()


def take_job(server: Running, options: argparse.Namespace, number: int, beside: bool) -> tuple[Taken, list[Answered]]:
    """The job, and the questions beside it that were asked in its steady part."""
    job = replace(WORKLOADS["W1"], concurrency=options.concurrency, priority=JOB_PRIORITY * beside)
    streamed = TesseraAsker(server.grpc, replace(job, always_streamed=True, priority=0), options.seed + number + 100)
    asker = TesseraAsker(server.grpc, job, options.seed + number)
    gpus = options.gpus.split(",") if options.gpus else []
    with questions(streamed, options.rate) if beside else nullcontext([]) as answered:
        taken = take(asker, options.processes, gpus, server.metrics, options.least)
    run = taken.run
    counted = [each for each in answered if run.began <= each.ended - each.seconds <= run.ended]
    if beside and not counted:
        raise RuntimeError(f"no question was asked in the {run.ended - run.began:.1f} s that count")
    print(f"{run.requests_s:.2f} req/s, {len(counted)} questions", file=sys.stderr, flush=True)
    return taken, counted


def first_tokens(answered: list[Answered]) -> dict[str, Any]:
    """Of questions, in milliseconds."""
    spent = sorted(1e3 * each.first_token for each in answered if each.first_token is not None)
    stages = zip(stage_names(), zip(*(each.stages for each in answered)))
    return {
        "ttft_p50_ms": round(counting.percentile(spent, 0.5), 1),
        "ttft_p99_ms": round(counting.percentile(spent, 0.99), 1),
        "most_ms": round(spent[-1], 1),
        "questions": len(spent),
        "stages_p50": {name: round(counting.percentile(sorted(values), 0.5), 1) for name, values in stages},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--processes", type=int, default=6, help="of the job's load")
    parser.add_argument("--concurrency", type=int, default=WORKLOADS["W1"].concurrency, help="of the job")
    parser.add_argument("--least", type=int, default=2560, help="steady answers of the job in each run")
    parser.add_argument("--rate", type=float, default=QUESTIONS_S, help="questions a second")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of pictures and times")
    parser.add_argument("--label", default="", help="stands behind `jobs` in the figures' names")
    options = parser.parse_args()
    with serve(setup(options)) as server:
        (before, _), (taken, asked), (after, _) = (take_job(server, options, run, run == 1) for run in range(3))
    alone, found = (before.run.requests_s + after.run.requests_s) / 2, first_tokens(asked)
    loss = round(100 * (1 - taken.run.requests_s / alone), 2)
    prefix = ".".join(filter(None, ("jobs", options.label)))
    notes = {"concurrency": options.concurrency, "rate": options.rate, **taken.notes, **setup_notes(options)}

    def emit(name: str, value: float, unit: str, **more: Any) -> None:
        figures.emit(f"{prefix}.{name}", value, unit, **notes, **more)

    rates = {
        "alone_req_s": [round(each.run.requests_s, 2) for each in (before, after)],
        "beside_req_s": round(taken.run.requests_s, 2),
        "ci95": [round(each.run.margin * each.run.requests_s, 2) for each in (before, taken, after)],
    }
    emit("ttft_p50_ms", found["ttft_p50_ms"], "ms", **found)
    emit("ttft_p99_ms", found["ttft_p99_ms"], "ms")
    emit("loss_pct", loss, "%", **rates)
    if taken.power:
        taken.power.emit(emit, taken.run.requests_s)
    missed = {name: bar for name, bar in BARS.items() if (found | {"loss_pct": loss})[name] > bar}
    print(f"missed: {missed}" if missed else "all bars are kept", file=sys.stderr, flush=True)
    return 1 if missed else 0
