"""An open loop: requests come when their time has come, a Poisson process, however long the others take.

A request's seconds count from the moment at which it was due, not from its sending, so that a slow server or a slow
load cannot leave waiting out; how late requests were sent is reported beside. The mix is the one that most users have:
98 % short answers, 1 % long prompts, 1 % long answers.
"""

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import counting
from closed_loop import Answered, in_processes
from targets import Asker
from workloads import PROMPT, WORKLOADS, Workload

W1 = WORKLOADS["W1"]
SHORT = tuple(replace(W1, name="short", tokens=tokens) for tokens in range(1, 6))
RULES = " ".join(
    f"Rule {number}: the socket, the cable and the lamp in room {number} are whole." for number in range(100)
)
LONG_PROMPT = replace(W1, name="long_prompt", prompts=(f"{RULES} {PROMPT}",))
LONG_ANSWER = replace(W1, name="long_answer", tokens=256)
WARM_UP = 0.2
"""The share of a run's seconds after which it counts."""
LIMIT_S = 2.0
STEP, CLOSE = 1.25, 1.04
"""A search goes up or down by the one, until it has cut what it looks for to the other."""
START_S = 60.0
"""At most, until all processes have their pictures and connections."""
CALLERS = 512
"""The most requests of a process under way; more come late."""


class Arrival(NamedTuple):
    """A request, and the seconds after the common start at which it is due."""

    at: float
    workload: Workload


class Outcome(NamedTuple):
    """What came of an arrival. ``late``: seconds from when it was due to its sending."""

    at: float
    kind: str
    late: float
    answered: Answered | None
    """Its seconds count from when it was due; None where it failed, for ``error``."""
    error: str = ""


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """The requests of this many seconds. Equal seeds give the same requests in the same order, at any rate.

    Of each hundred one has a long prompt and one a long answer, anywhere among them.
    """
    dice, at = random.Random(seed), 0.0
    due: list[Arrival] = []
    while True:
        kinds = [LONG_PROMPT, LONG_ANSWER, *(dice.choice(SHORT) for _ in range(98))]
        dice.shuffle(kinds)
        for workload in kinds:
            at += dice.expovariate(1.0) / rate
            if at >= seconds:
                return due
            due.append(Arrival(at, workload))


def send_all(number: int, asker: Asker, arrivals: Sequence[Arrival], start: Any) -> list[Outcome]:
    """One process's part of the load: sends each request when it is due; what came of them."""
    pictures = asker.pictures(number, len(arrivals))
    with asker.connection() as ask, ThreadPoolExecutor(CALLERS) as pool:
        start.wait(START_S)
        began = time.perf_counter()

        def send(arrival: Arrival) -> Outcome:
            workload, due = arrival.workload, began + arrival.at
            late = time.perf_counter() - due
            try:
                answered = Answered.of(ask(pictures.deal(), workload, *workload.prompts), due)
            except Exception as error:  # of an overloaded server: a figure of this run
                return Outcome(arrival.at, workload.name, late, None, f"{type(error).__name__}: {error}"[:300])
            return Outcome(arrival.at, workload.name, late, answered)

        sent = []
        for arrival in arrivals:
            time.sleep(max(0.0, began + arrival.at - time.perf_counter()))
            sent.append(pool.submit(send, arrival))
        return [each.result() for each in sent]


def run(asker: Asker, due: Sequence[Arrival], processes: int) -> list[Outcome]:
    """Sends these requests, dealt out to the processes in turn; what came of them, in the order in which they were due.

    Raises TimeoutError when it is not over by when the last that was due has had its time.
    """
    count = min(processes, len(due))
    start = multiprocessing.get_context("spawn").Barrier(count)
    tasks = [(send_all, number, asker, due[number::processes], start) for number in range(count)]
    results = in_processes(tasks, due[-1].at + asker.patience_s + START_S)
    return sorted(outcome for outcomes in results for outcome in outcomes)


@dataclass(frozen=True)
class Counted:
    """A run's figures: of what was due after the warm-up. Times in seconds."""

    rate: float
    requests: int
    p50: float
    p99: float
    """As p50, of the short answers; infinite where a request failed."""
    windows: tuple[float, ...]
    """p99 in each fifth of them, in the order in which they were due."""
    late_p99: float
    late_most: float
    kinds: dict[str, dict[str, float | None]]
    errors: tuple[str, ...]
    """Of the warm-up too."""

    @property
    def notes(self) -> dict[str, object]:
        """For a figure's line, in milliseconds."""
        return {
            "rate": round(self.rate, 2),
            "requests": self.requests,
            "p50_ms": milliseconds(self.p50),
            "p99_ms": milliseconds(self.p99),
            "late_p99_ms": milliseconds(self.late_p99),
            "late_most_ms": milliseconds(self.late_most),
            "failed": len(self.errors),
        }


def count(rate: float, seconds: float, outcomes: Sequence[Outcome]) -> Counted:
    """Counts a run of this many requests a second.

    Raises ValueError where nothing with a short answer was due after the warm-up.
    """
    counted = [outcome for outcome in sorted(outcomes) if outcome.at >= WARM_UP * seconds]
    short = [outcome.answered.seconds for outcome in counted if outcome.kind == "short" and outcome.answered]
    errors = tuple(outcome.error for outcome in outcomes if outcome.answered is None)
    if not short and not errors:
        raise ValueError(f"no short answer was due in {seconds:g} s at {rate:g} requests a second")
    late = sorted(outcome.late for outcome in counted)
    kinds = {}
    for kind in sorted({outcome.kind for outcome in counted}):
        spent = sorted(outcome.answered.seconds for outcome in counted if outcome.kind == kind and outcome.answered)
        if spent:
            shares = {"p50_ms": 0.5, "p99_ms": 0.99, "most_ms": 1.0}
            kinds[kind] = {"answers": len(spent)} | {
                name: milliseconds(counting.percentile(spent, share)) for name, share in shares.items()
            }
    places = [short[first:last] for first, last in pairwise(counting.cut(len(short))) if last > first]
    return Counted(
        rate=rate,
        requests=len(counted),
        p50=counting.percentile(sorted(short), 0.5) if short else float("inf"),
        p99=float("inf") if errors else counting.percentile(sorted(short), 0.99),
        windows=tuple(counting.percentile(sorted(window), 0.99) for window in places),
        late_p99=counting.percentile(late, 0.99),
        late_most=late[-1],
        kinds=kinds,
        errors=errors,
    )


def milliseconds(seconds: float) -> float | None:
    """Rounded; None for what is infinite, which JSON has not."""
    return round(1e3 * seconds, 1) if isfinite(seconds) else None


def highest(trial: Callable[[float], Counted], guess: float, trials: int, limit_s: float = LIMIT_S) -> Counted:
    """The run at the highest rate whose p99 of short answers keeps within the limit.

    From the guess up or down until one rate keeps within it and one does not, then between them; ``trials`` at most.

    Raises RuntimeError where none of them kept within it, or all did.
    """
    best: Counted | None = None
    over, rate = float("inf"), guess
    for _ in range(trials):
        run = trial(rate)
        if run.p99 <= limit_s:
            best = run
        else:
            over = rate
        if best is None:
            rate = over / STEP
        elif over == float("inf"):
            rate = best.rate * STEP
        elif over / best.rate <= CLOSE:
            break
        else:
            rate = (over * best.rate) ** 0.5
    if best is None:
        raise RuntimeError(f"no rate down to {over:.3g} requests a second kept p99 within {limit_s:g} s")
    if over == float("inf"):
        raise RuntimeError(
            f"all rates up to {best.rate:.3g} requests a second kept p99 within {limit_s:g} s: begin higher"
        )
    return best
