"""Cold starts, each with a first burst: does every stage live, is every question answered? (`make bench NAME=starts`)

A server is started, and 1.5 s after it is ready `--burst` questions about distinct pictures come at once; then it is
stopped, and the next one started. A stage that dies ends its server, and is counted, with the line of the log that
says why. `--lanes` servers start, answer and stop beside each other, out of step, which is harder than one at a time:
the processors are busy while a stage grows its memory.

    python loadtest/bench starts --checkpoint loadtest/shapes/mineru25-shape --weights random --workload W5a \\
        --gpus 0 --starts 60 --lanes 4 --seconds 540

`--tree DIR` starts the server of another checkout, `--log FOLDER` keeps the servers' logs. After `--seconds` no further
start begins, nor after one that fails before any was ready.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import figures
from serving import Setup, add_arguments, serve, setup, setup_notes
from workloads import WORKLOADS, Pictures, Workload

from tessera_client import Client, Retry

QUIET_S = 1.5
LIVES_S = 2.0
"""How long a server is watched after its last answer."""
ANSWER_S = 60.0
SIGNS = ("terminate called", "lock_exception", "what():", "Signal", "died", "not healthy")


@dataclass
class Tally:
    """What came of the starts so far."""

    startup_s: list[float] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answers: int = 0


def burst(addresses: list[str], workload: Workload, pictures: list[bytes]) -> tuple[int, list[str]]:
    """Asks about all pictures at once. Returns how many were answered, and why the others were not."""
    with (
        Client(addresses, timeout=ANSWER_S, retry=Retry(attempts=1)) as client,
        ThreadPoolExecutor(len(pictures)) as threads,
    ):
        question = workload.question(workload.prompts[0])
        asked = [threads.submit(client.ask, picture, question, **workload.sampling) for picture in pictures]
        errors = [each.exception() for each in asked]
    return errors.count(None), [f"{type(error).__name__}: {error}" for error in errors if error is not None]


def start_once(asked: Setup, workload: Workload, pictures: list[bytes], tally: Tally) -> None:
    """One start, its burst and its end."""
    try:
        with serve(asked) as running:
            tally.startup_s.append(running.startup_s)
            time.sleep(QUIET_S)
            answered, failed = burst(running.grpc, workload, pictures)
            tally.answers += answered
            tally.failed += failed
            time.sleep(LIVES_S)
    except RuntimeError as error:
        assert asked.log is not None
        written = asked.log.parent.glob(f"{asked.log.stem}*")  # a server of a GPU has the GPU in its log's name
        lines = [line for log in written for line in log.read_text(errors="replace").splitlines()]
        told = [line for line in lines if any(sign in line for sign in SIGNS)]
        tally.deaths.append("\n".join([str(error), *told[:12]]))


def run(asked: Setup, workload: Workload, options: argparse.Namespace, logs: Path) -> Tally:
    """The starts, in lanes."""
    tally, numbers, until = Tally(), count(), time.monotonic() + options.seconds
    dealt = Pictures(workload, options.seed)
    pictures = [dealt.deal() for _ in range(options.burst)]

    def next_start() -> Iterator[int]:
        while (number := next(numbers)) < options.starts and time.monotonic() < until:
            if tally.deaths and not tally.startup_s:
                return
            yield number

    def lane(place: int) -> None:
        time.sleep(place * options.apart)
        for number in next_start():
            start_once(replace(asked, log=logs / f"start-{number:03}.log"), workload, pictures, tally)
            print(f"start {number}: {len(tally.deaths)} deaths so far", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(lane, range(options.lanes)))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--burst", type=int, default=96, help="questions at once")
    parser.add_argument("--lanes", type=int, default=1, help="servers beside each other")
    parser.add_argument("--apart", type=float, default=4.0, help="seconds between the lanes' first starts")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--seed", type=int, default=1)
    add_arguments(parser)
    options = parser.parse_args()
    if options.lanes > 1:
        os.environ.setdefault("TESSERA_GPU_MEMORY", f"{0.9 / options.lanes:.2f}")
    with tempfile.TemporaryDirectory(prefix="tessera-starts-") as folder:
        logs = options.log or Path(folder)
        logs.mkdir(exist_ok=True)
        tally = run(setup(options), WORKLOADS[options.workload], options, logs)
    for told in [*tally.deaths, *tally.failed[:5]]:
        print(told, file=sys.stderr)
    starts = len(tally.startup_s)
    figures.emit(
        f"starts.{options.checkpoint.name}.deaths",
        len(tally.deaths),
        "deaths",
        starts=starts,
        lanes=options.lanes,
        answered=tally.answers,
        unanswered=len(tally.failed),
        startup_p50_s=round(statistics.median(tally.startup_s), 1) if starts else None,
        **setup_notes(options),
    )
    return int(bool(tally.deaths or tally.failed))
