"""The ladder: one job, an optimisation a rung, from the plain loop of transformers up (`make bench NAME=ladder`).

The job is W2's: distinct pictures of 480x320, at most 12 tiles, 1,852 prompt tokens, 4 tokens of answer, on
InternVL3-8B's shape with random weights. At "equal" tokens it is that; from the rung of the tile policy on it is also
asked by "policy", which gives fewer tokens. Recall is the default model's, on the yes/no questions of the held-out set,
by the same server and request options. In three parts, each by itself if need be, all of them into --results:

    python loadtest/bench ladder --parts speed --rungs transformers start fast_preprocessing tile_policy
    python loadtest/bench ladder --parts recall --gpus ""      on a CPU, without what concerns a GPU only
    python loadtest/bench ladder --parts report                docs/ladder.md, and the figures `ladder.*`

A rung that fails is told at the end and does not stop the others. Times on an H200: a server 12 to 22 s, its jobs 4 to
16 s, the loop of transformers a minute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
from closed_loop import in_processes
from measuring import stage_milliseconds, take
from serving import DEFAULT_CHECKPOINT, Running, serve
from targets import TesseraAsker
from workloads import PROMPT, picture

from bench import ladder_report
from bench.ladder_rungs import GPU_ONLY, NAMES, RUNGS, SHAPE, Job, jobs, recall_checkpoint, setup
from tessera_client import Client
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item, heldout_items

TRANSFORMERS = "transformers"
LOOP_S = 3600.0
"""The most that the loop of transformers may take."""
PARTS = ("speed", "recall", "report")
BATCHES = (1, 2, 4, 8, 16, 32)
ANSWER_TOKENS = 16  # more than yes or no has
RECALL_IN_FLIGHT = 16


def add(file: Path, **line: Any) -> None:
    """Adds a line to a file of JSON lines, whose newest of a rung and job counts; numbers have five digits."""
    about = {
        "machine": figures.machine(),
        "versions": {name: figures.versions().get(name) for name in ("torch", "triton", "transformers")},
        "commit": figures.commit(),
        "date": datetime.date.today().isoformat(),
    }
    short = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in line.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(short | about, separators=(",", ":")) + "\n")
    say({name: value for name, value in short.items() if name != "wrong"})


def say(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


def servers(names: Iterable[str]) -> dict[str, list[str]]:
    """The rungs asked of each rung's server."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(RUNGS[name].server or name, []).append(name)
    return found


@contextmanager
def served(
    server_of: str, names: list[str], options: argparse.Namespace, checkpoint: Path | None
) -> Iterator[tuple[Running, list[tuple[str, str, Job]]]]:
    """This rung's server, and (rung, kind, job) of all that it is asked for the rungs of these names."""
    asked = [(name, kind, job) for name in names for kind, job in jobs(name).items() if kind in options.jobs]
    with (
        tempfile.TemporaryDirectory(prefix="tessera-ladder-") as folder,
        serve(setup(server_of, Path(folder), options.gpus, checkpoint)) as server,
    ):
        yield server, asked


def measure_speed(server_of: str, names: list[str], options: argparse.Namespace) -> None:
    """The jobs of the rungs that this rung's server is asked."""
    with served(server_of, names, options, options.checkpoint) as (server, asked):
        for name, kind, job in asked:
            job = replace(job, concurrency=options.in_flight or job.concurrency)
            prompt_tokens = first_answers(server.grpc, job)
            asker = TesseraAsker(server.grpc, job, random.randrange(1 << 30))
            run, power, notes, _ = take(asker, options.processes, options.gpus, server.metrics)
            add(
                options.results,
                rung=name,
                job=kind,
                req_s=run.requests_s,
                ci95=run.margin * run.requests_s,
                p50_ms=1e3 * run.p50,
                p99_ms=1e3 * run.p99,
                tokens=0 if job.labels else job.tokens,
                prompt_tokens=prompt_tokens,
                requests=run.count,
                concurrency=job.concurrency,
                startup_s=server.startup_s,
                stages_p50=stage_milliseconds(run),
                **({} if power is None else power._asdict()),
                **notes,
            )


def first_answers(addresses: list[str], job: Job) -> int:
    """As many as will be in flight, so that no kernel is compiled later; of how many tokens their prompts were."""
    seeds = [random.randrange(1 << 30) for _ in range(job.concurrency)]
    asked = ((picture(job.width, job.height, seed), PROMPT) for seed in seeds)
    with Client(addresses) as client:
        answers = client.ask_many(asked, concurrency=job.concurrency, **job.sampling)
        (tokens,) = {answer.usage.prompt_tokens for answer in answers}
    return tokens


def loop_speed(options: argparse.Namespace) -> None:
    """The foot of the ladder, at all its batch sizes; in a process of its own, as the other rungs' servers."""
    from bench import ladder_transformers

    loop = ladder_transformers.Loop(options.checkpoint or SHAPE, device_of(options), options.checkpoint is None)
    for batch in options.batches:
        add(options.results, **ladder_transformers.measure(loop, batch, options.gpus))


def loop_recall(options: argparse.Namespace, items: list[Item]) -> None:
    """What transformers answers to the questions, one after the other."""
    import torch

    from bench.ladder_transformers import Loop

    torch.set_num_threads(1)
    loop = Loop(DEFAULT_CHECKPOINT, device_of(options), random_weights=False)
    texts = [loop.answer(item.picture.read_bytes(), item.question) for item in items]
    add_recall(options.results, TRANSFORMERS, "equal", [recall.Outcome(*pair) for pair in zip(items, texts)])


def device_of(options: argparse.Namespace) -> str:
    return "cuda" if options.gpus else "cpu"


def measure_recall(server_of: str, names: list[str], options: argparse.Namespace, items: list[Item]) -> None:
    """The same servers and request options with a trained model."""
    checkpoint = recall_checkpoint(server_of, options.int4)
    if checkpoint is None:
        say(f"{server_of}: no recall without --int4 FOLDER, the default model as `tessera quantize` writes it")
        return
    with served(server_of, names, options, checkpoint) as (server, jobs_asked), Client(server.grpc) as client:
        for name, kind, job in jobs_asked:
            sampling = job.sampling
            if not job.labels:
                sampling |= {"ignore_eos": False, "max_tokens": ANSWER_TOKENS}
            outcomes, _ = recall.run(client, items, concurrency=RECALL_IN_FLIGHT, **sampling)
            add_recall(options.results, name, kind, outcomes)


def add_recall(file: Path, name: str, kind: str, outcomes: list[recall.Outcome]) -> None:
    """One line, with the places of the wrong answers in the set. Raises RuntimeError where a question failed."""
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{len(errors)} questions failed: {errors[0]}")
    add(
        file,
        rung=name,
        job=kind,
        recall=recall.figures(outcomes, 0.0)["recall.macro"],
        questions=len(outcomes),
        wrong=[place for place, outcome in enumerate(outcomes) if not outcome.right],
    )


def questions(options: argparse.Namespace, folder: Path) -> list[Item]:
    """The yes/no questions that count, or the first of them."""
    items = heldout_items(options.limit, folder, root=figures.ROOT)
    return [item for item in items if item.kind == "presence" and item.scored]


def climb(options: argparse.Namespace) -> list[str]:
    """Measures what is asked for; names of rungs that failed."""
    failed = []

    def attempt(name: str, measure: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        try:
            measure(*arguments)
        except Exception:  # the time on a GPU is short: the other rungs are worth it
            traceback.print_exc()
            failed.append(name)
        say(f"{name}: {time.perf_counter() - began:.1f} s")

    grouped = servers(name for name in options.rungs if name != TRANSFORMERS)
    if "speed" in options.parts:
        if TRANSFORMERS in options.rungs:
            attempt(TRANSFORMERS, in_processes, [(loop_speed, options)], LOOP_S)
        for server_of, names in grouped.items():
            attempt(server_of, measure_speed, server_of, names, options)
    if "recall" in options.parts:
        with tempfile.TemporaryDirectory(prefix="tessera-ladder-") as folder:
            items = questions(options, Path(folder))
            if TRANSFORMERS in options.rungs:
                attempt(TRANSFORMERS, in_processes, [(loop_recall, options, items)], LOOP_S)
            for server_of, names in grouped.items():
                if asked := [name for name in names if name not in GPU_ONLY]:
                    attempt(server_of, measure_recall, server_of, asked, options, items)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rungs", nargs="+", choices=(TRANSFORMERS, *NAMES), default=[TRANSFORMERS, *NAMES])
    parser.add_argument("--jobs", nargs="+", choices=("equal", "policy"), default=["equal", "policy"])
    parser.add_argument("--results", type=Path, default=ladder_report.RESULTS, metavar="FILE.jsonl")
    parser.add_argument("--gpus", default="0", help="the GPU's number; empty for the CPU")
    parser.add_argument("--checkpoint", type=Path, help="of the speed; default: InternVL3-8B's shape, random weights")
    parser.add_argument("--int4", type=Path, metavar="FOLDER", help="the default model in 4 bits, for its recall")
    parser.add_argument("--in-flight", type=int, help="requests, in place of a rung's own number")
    parser.add_argument("--processes", type=int, default=4, help="of the load generator")
    batches = {"nargs": "*", "type": int, "choices": BATCHES, "default": BATCHES}
    parser.add_argument("--batches", **batches, help="of the loop of transformers (%(default)s)")
    parser.add_argument("--limit", type=int, help="recall by the first N questions of the held-out set")
    options = parser.parse_args()
    options.gpus = tuple(filter(None, [options.gpus]))
    failed = climb(options)
    if "report" in options.parts:
        ladder = ladder_report.Ladder.read(options.results)
        ladder_report.update(ladder)
        for metric, value, unit, notes in ladder.figures():
            figures.emit(metric, value, unit, "make bench NAME=ladder", **notes)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0
