"""The ladder: one job, an optimisation a rung, from the plain loop of transformers up (`make bench NAME=ladder`).

The job is W2's: distinct pictures of 480x320, at most 12 tiles, 1,852 prompt tokens, 4 tokens of answer, on
InternVL3-8B's shape with random weights. At "equal" tokens it is that; from the rung of the tile policy on it is also
asked by "policy", which gives fewer tokens; the prefix cache is asked W6 as well. Each kind with one request in flight,
compared by the median answer's time, and with as many as a rung can use, compared by requests a second of the whole
turn: a step answers many at once, so a steady part's rate, which depends on where that is cut, differs by 5 % from
turn to turn. Recall is the default model's, on the yes/no questions of the held-out set, by the same server.

A rung is measured against the one below it in turns, until the 95 % interval of their ratio is at most 2 % either way,
or its part of the --seconds is over; what one pair leaves of its part is the next ones'. Up are --together servers of
neighbouring rungs, each with --share of the GPU's memory, and one is asked at a time: in a turn each answers once, for
the rung below it and the one above it. Where they are asked the same, they get the same pictures. An idle server of
ours launches nothing: its engine and its stages wait for work, and the launcher's pings, every five seconds, are no
work. So the GPU has no reason to switch to it. MPS is no matter of the machine here: each server with MPS has a daemon
of its own, and those of the rungs below use none.

The rungs go from the top down, for the server in 4 bits keeps a second copy of its weights only while half of the card
is free.

In three parts, each by itself if need be, all of them into --results:

    python loadtest/bench ladder --parts speed --rungs ends int4 fp8_vit
    python loadtest/bench ladder --parts recall --gpus ""      on a CPU, without what concerns a GPU only
    python loadtest/bench ladder --parts report                docs/ladder.md, and the figures `ladder.*`

What fails is told at the end and does not stop the others. The --seconds are those of all servers' starts and turns,
but for the turn that is under way when they are over: on an H200 a server starts in 10 to 20 s, and a turn of two takes
up to 20. --rungs, --jobs and --flights cut the ladder into pieces. The load is this process, which asks 1,400 questions
a second of a server that does nothing.
"""

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import figures
import serving
import turns
from closed_loop import in_processes
from measuring import take
from serving import DEFAULT_CHECKPOINT, Running, serve
from targets import TesseraAsker
from workloads import PROMPT, Workload, picture

from bench import ladder_report, ladder_transformers
from bench.ladder_rungs import (
    EAGER_DECODER,
    FLIGHTS,
    GPU_ONLY,
    KINDS,
    NAMES,
    ROWS_ON_CPU,
    RUNGS,
    SHAPE,
    TRANSFORMERS,
    Pair,
    jobs,
    kept_ways,
    pairs,
    recall_checkpoint,
    server_of,
    setup,
)
from bench.ladder_transformers import Turn
from tessera_client import Client, Usage
from tessera_evaluation import recall
from tessera_evaluation.datasets import Item, heldout_items

LOOP_S = 3600.0
"""The most that the loop of transformers may take for its recall."""
PARTS = ("speed", "recall", "report")
ENDS = "ends"
BATCHES = (1, 2, 4, 8, 16, 32)
ANSWER_TOKENS = 16  # more than yes or no has
RECALL_IN_FLIGHT = 16
LEAST_ANSWERS = 8
"""Of a turn, where five rounds of what is in flight are fewer."""
WARM_UP = 16
"""Requests, or three rounds of them, before a server's first turn of a job: with what is compiled or allocated late,
that turn would be an outlier, for which few others make up."""


def add(file: Path, **line: Any) -> None:
    """Adds a line to a file of JSON lines, whose newest of its place counts; numbers have five digits."""
    about = {
        "machine": figures.machine(),
        "versions": {name: figures.versions().get(name) for name in ("torch", "triton", "transformers")},
        "commit": figures.commit(),
        "date": datetime.date.today().isoformat(),
    }
    short = json.loads(json.dumps(line), parse_float=lambda number: float(f"{float(number):.5g}"))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(short | about, separators=(",", ":")) + "\n")
    say({name: value for name, value in short.items() if name != "wrong"})


def say(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


class Sides:
    """The servers of neighbouring rungs and the loop of transformers, each started when it is first wanted."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._up: dict[str, tuple[ExitStack, Any]] = {}
        self._known: dict[tuple[str, str], int] = {}
        self._batch = 0

    def bring_up(self, wanted: Collection[str]) -> None:
        """Ends what is up and not wanted, and starts what is wanted and not up, in this order."""
        for other in [each for each in self._up if each not in wanted]:
            self._known = {place: tokens for place, tokens in self._known.items() if place[0] != other}
            self._up.pop(other)[0].close()
        for name in wanted:
            if name not in self._up:
                with ExitStack() as stack:
                    started = stack.enter_context(self._start(name))
                    self._up[name] = stack.pop_all(), started

    def _start(self, name: str) -> Any:
        options = self._options
        if name == TRANSFORMERS:
            return ladder_transformers.apart(options.checkpoint or SHAPE, device_of(options), not options.checkpoint)
        return served(name, options, options.checkpoint, options.share)

    def close(self) -> None:
        with ExitStack() as closing:
            for stack, _ in self._up.values():
                closing.callback(stack.close)
            self._up.clear()
            self._known.clear()

    def ask(self, name: str, job: Workload, seed: int) -> Turn:
        """A turn of a rung. Two jobs never have the same pictures, for they may be one server's."""
        gpus, own = self._options.gpus, server_of(name)
        server = self._up[own][1]
        if name == TRANSFORMERS:
            return server(1 if job.concurrency == 1 else self._best(server), seed, gpus)
        place = own, str(job)
        if place not in self._known:
            self._known[place] = first_answers(server.grpc, job, max(WARM_UP, 3 * job.concurrency)).prompt_tokens
        asker = TesseraAsker(server.grpc, job, seed ^ zlib.crc32(str(job).encode()))
        run, power, notes, _ = take(asker, 0, gpus, server.metrics, LEAST_ANSWERS)
        if gpus:
            check(name, notes)
        return Turn(run.whole_requests_s, run.p50, self._known[place], job.concurrency, power and power.watts)

    def _best(self, loop: Callable[..., Turn]) -> int:
        """The loop's fastest batch."""
        if not self._batch:
            rates = {batch: loop(batch, batch, ()).req_s for batch in self._options.batches}
            say({"transformers, req/s by batch": rates})
            self._batch = max(rates, key=rates.__getitem__)
        return self._batch


@contextmanager
def served(name: str, options: argparse.Namespace, checkpoint: Path | None, share: float = 0.9) -> Iterator[Running]:
    """A rung's server."""
    with (
        tempfile.TemporaryDirectory(prefix="tessera-ladder-") as folder,
        serve(setup(name, Path(folder), options.gpus, checkpoint, share, options.settings)) as server,
    ):
        yield server


def first_answers(addresses: list[str], job: Workload, count: int = 0) -> Usage:
    """This many, or as many as will be in flight: no kernel is compiled later. What tokens each of them took."""
    seeds = [random.randrange(1 << 30) for _ in range(count or job.concurrency)]
    asked = ((picture(job.width, job.height, seed), PROMPT) for seed in seeds)
    with Client(addresses) as client:
        answers = client.ask_many(asked, concurrency=job.concurrency, **job.sampling)
        (usage,) = {answer.usage for answer in answers}
    return usage


def check(name: str, notes: Mapping[str, Any]) -> None:
    """Raises RuntimeError where a server on a GPU did not work as its rung says."""
    ways, on_cpu, graphs = kept_ways(name), notes["embeddings_on_cpu"], notes["graph_steps"]
    if (on_cpu > 0) != (ROWS_ON_CPU in ways) or (graphs > 0 and EAGER_DECODER in ways):
        raise RuntimeError(
            f"the server of {name} did not work as its rung says: {on_cpu} requests' rows came over the CPU, {graphs} "
            "of its steps ran as CUDA graphs"
        )


def measure_speed(group: list[Pair], sides: Sides, options: argparse.Namespace, until: float) -> None:
    """Pairs of a few servers, by the number in flight: each turn asks all of them, each for all that it is in. None
    begins after ``until``, by time.monotonic()."""
    ways: dict[tuple[str, str], partial[Turn]] = {}

    def way(pair: Pair, name: str, flight: str) -> partial[Turn]:
        job = pair.job(name)
        job = replace(job, concurrency=1 if flight == "one" else options.in_flight or job.concurrency)
        return ways.setdefault((name, str(job)), partial(sides.ask, name, job))

    try:
        sides.bring_up(servers(group))
        # One after the other, so that little time lies between the sides of a pair.
        for left, flight in zip(range(len(options.flights), 0, -1), options.flights):
            compared = {}
            for pair in group:
                both = (way(pair, name, flight) for name in (pair.rung, pair.below))
                name = f"{pair.rung} over {pair.below}, {pair.kind}, {flight}"
                compared[name] = turns.Comparison(*both, WORTH[flight])
            turns.compare(compared, (until - time.monotonic()) / left)
            for pair, each in zip(group, compared.values()):
                add(options.results, **line(pair, flight, each))
    except Exception:
        sides.close()  # a server that failed is not the next ones'
        raise


WORTH: dict[str, Callable[[Turn], float]] = {"many": lambda turn: turn.req_s, "one": lambda turn: 1 / turn.p50}


def line(pair: Pair, flight: str, compared: turns.Comparison) -> dict[str, Any]:
    """Of the results; what both sides have stands below first. Raises RuntimeError where tokens differ at equal
    tokens."""
    sides = list(zip(*compared.turns))
    tokens = [side[0].prompt_tokens for side in sides]
    if pair.kind != "policy" and len(set(tokens)) > 1:
        raise RuntimeError(f"prompts of {pair.below} and {pair.rung} should be equal, and have {tokens} tokens")
    watts = [[turn.watts for turn in side if turn.watts is not None] for side in sides]
    return {
        "rung": pair.rung,
        "below": pair.below,
        "job": pair.kind,
        "flight": flight,
        "in_flight": [side[0].in_flight for side in sides],
        "ratio": compared.ratio.value,
        "ci95": compared.ratio.ci95,
        "turns": len(compared.turns),
        "by_turn": compared.by_turn,
        "req_s": [fmean(turn.req_s for turn in side) for side in sides],
        "p50_ms": [1e3 * median(turn.p50 for turn in side) for side in sides],
        "prompt_tokens": tokens,
        **({"watts": [fmean(drawn) for drawn in watts]} if all(watts) else {}),
    }


def groups(options: argparse.Namespace) -> list[list[Pair]]:
    """The pairs that are wanted, from the top down: as many together as there may be servers up."""
    found: list[list[Pair]] = []
    for pair in reversed(pairs()):
        if (ENDS if pair.ends else pair.rung) in options.rungs and pair.kind in options.jobs:
            if not found or len(servers([*found[-1], pair])) > options.together:
                found.append([])
            found[-1].append(pair)
    return found


def servers(group: list[Pair]) -> list[str]:
    """Of these pairs, each once, from the top down."""
    return list(dict.fromkeys(name for pair in group for name in pair.servers))


def loop_recall(options: argparse.Namespace, items: list[Item]) -> None:
    """What transformers answers to the questions, one after the other."""
    import torch

    from bench.ladder_transformers import Loop

    torch.set_num_threads(1)
    loop = Loop(DEFAULT_CHECKPOINT, device_of(options), random_weights=False)
    texts = [loop.answer(item.picture.read_bytes(), item.question) for item in items]
    add_recall(options.results, TRANSFORMERS, "equal", [recall.Outcome(*pair) for pair in zip(items, texts)])


def device_of(options: argparse.Namespace) -> str:
    return f"cuda:{options.gpus[0]}" if options.gpus else "cpu"


def measure_recall(name: str, names: list[str], options: argparse.Namespace, items: list[Item]) -> None:
    """A rung's server with a trained model, by the request options of the rungs that it is asked for."""
    checkpoint = recall_checkpoint(name, options.int4)
    if checkpoint is None:
        say(f"{name}: no recall without --int4 FOLDER, the default model as `tessera quantize` writes it")
        return
    asked = [(rung, kind, job) for rung in names for kind, job in jobs(rung).items() if kind in options.jobs]
    with served(name, options, checkpoint) as server, Client(server.grpc) as client:
        for rung, kind, job in asked:
            sampling = job.sampling
            if not job.labels:
                sampling |= {"ignore_eos": False, "max_tokens": ANSWER_TOKENS}
            outcomes, _ = recall.run(client, items, concurrency=RECALL_IN_FLIGHT, **sampling)
            add_recall(options.results, rung, kind, outcomes)


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
    """Measures what is asked for; names of what failed."""
    failed = []

    def attempt(name: str, measure: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        try:
            measure(*arguments)
        except Exception:  # the time on a GPU is short: the other rungs are worth it
            traceback.print_exc()
            failed.append(name)
        say(f"{name}: {time.perf_counter() - began:.1f} s")

    if "speed" in options.parts:
        wanted, sides = groups(options), Sides(options)
        end = time.monotonic() + options.seconds
        try:
            for place, group in enumerate(wanted):
                parts = [1 + len(each) for each in wanted[place:]]  # a server's start, and as much for each pair
                until = time.monotonic() + (end - time.monotonic()) * parts[0] / sum(parts)
                attempt(", ".join(servers(group)), measure_speed, group, sides, options, until)
        finally:
            sides.close()
    if "recall" in options.parts:
        asked: dict[str, list[str]] = {}
        for name in options.rungs:
            if name in RUNGS and name not in GPU_ONLY:
                asked.setdefault(server_of(name), []).append(name)
        with tempfile.TemporaryDirectory(prefix="tessera-ladder-") as folder:
            items = questions(options, Path(folder))
            if TRANSFORMERS in options.rungs:
                attempt(TRANSFORMERS, in_processes, [(loop_recall, options, items)], LOOP_S)
            for name, names in asked.items():
                attempt(name, measure_recall, name, names, options, items)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    rungs = (TRANSFORMERS, *NAMES, ENDS)
    of_rungs = "their pairs with the one below, or the whole ladder's ends; the loop of transformers has recall alone"
    parser.add_argument("--rungs", nargs="+", choices=rungs, default=list(rungs), help=of_rungs)
    parser.add_argument("--jobs", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--flights", nargs="+", choices=FLIGHTS, default=list(FLIGHTS), help="requests in flight")
    parser.add_argument("--seconds", type=float, default=2400.0, help="after which no turn of the speed begins")
    parser.add_argument("--together", type=int, default=3, choices=range(2, 14), help="servers that are up at once")
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory for each server")
    given = {"nargs": "*", "action": "extend", "default": [], "metavar": "STAGE.PARAMETER=VALUE"}
    parser.add_argument("--set", **given, dest="settings", help="of all servers")
    parser.add_argument("--results", type=Path, default=ladder_report.RESULTS, metavar="FILE.jsonl")
    parser.add_argument("--gpus", default="0", help="the GPU's number; empty for the CPU, whose figures are `trial.*`")
    parser.add_argument("--checkpoint", type=Path, help="of the speed; default: InternVL3-8B's shape, random weights")
    parser.add_argument("--int4", type=Path, metavar="FOLDER", help="the default model in 4 bits, for its recall")
    parser.add_argument("--in-flight", type=int, help="requests, in place of a rung's own number")
    batches = {"nargs": "+", "type": int, "choices": BATCHES, "default": BATCHES}
    parser.add_argument("--batches", **batches, help="that the loop of transformers tries (%(default)s)")
    parser.add_argument("--limit", type=int, help="recall by the first N questions of the held-out set")
    options = parser.parse_args()
    options.gpus = tuple(filter(None, [options.gpus]))
    options.settings = serving.pairs(options.settings, "STAGE.PARAMETER=VALUE")
    failed = climb(options)
    if "report" in options.parts:
        own = options.results.resolve() == ladder_report.RESULTS
        if own:
            ladder_report.prune(options.results)
        ladder = ladder_report.Ladder.read(options.results)
        if own:
            ladder_report.update(ladder)
        for metric, value, unit, notes in ladder.figures():
            trial = "" if options.gpus else "trial."
            figures.emit(trial + metric, value, unit, "make bench NAME=ladder", **notes)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0
