"""Ways of serving in turns (A, B, A, B, ...) on one machine, and how sure the ratio of two of them is.

What the machine does meanwhile falls on all ways: a ratio is of each turn's pair, and its interval is by the turns.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import count
from math import exp, log, sinh, sqrt
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import counting
import figures
from measuring import take
from targets import TesseraAsker
from workloads import Workload

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 95 %, of one degree of freedom and more; the last is kept for all above."""

Runs = list[counting.Run]


class Ratio(NamedTuple):
    """A ratio, and half its 95 % interval."""

    value: float
    ci95: float

    @property
    def sure(self) -> bool:
        """Whether the first way is better for certain."""
        return self.value - self.ci95 > 1


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of two ways' rates by turns, of which there are two or more: the geometric mean of the pairs' ratios."""
    logs = [log(first / second) for first, second in zip(above, below, strict=True)]
    return Ratio(exp(fmean(logs)), exp(fmean(logs)) * sinh(half_interval(logs)))


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of two values or more."""
    return STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(values) / sqrt(len(values))


def in_turns(
    ways: Mapping[str, Sequence[str]], workload: Workload, turns: int, processes: int, seed: int, least: int = 0
) -> dict[str, Runs]:
    """Asks each way's servers, at these gRPC addresses, the workload in each turn. Nobody sees a picture twice."""
    runs: dict[str, Runs] = {way: [] for way in ways}
    seeds = count(seed)
    for turn in range(turns):
        for way, addresses in ways.items():
            run = take(TesseraAsker(list(addresses), workload, next(seeds)), processes, least=least).run
            runs[way].append(run)
            told = f"{run.requests_s:.2f} req/s, p99 {1e3 * run.p99:.0f} ms"
            print(f"{workload.name}, turn {turn + 1} of {turns}, {way}: {told}", file=sys.stderr, flush=True)
    return runs


def rates(runs: Runs) -> list[float]:
    return [run.requests_s for run in runs]


def report_way(name: str, runs: Runs, **notes: Any) -> None:
    """Emits ``name.req_s`` and ``name.p99_ms`` of a way."""
    ci95 = round(half_interval(rates(runs)), 2)
    figures.emit(f"{name}.req_s", round(fmean(rates(runs)), 2), "req/s", ci95=ci95, **notes)
    p50, p99 = (1e3 * median(getattr(run, part) for run in runs) for part in ("p50", "p99"))
    figures.emit(f"{name}.p99_ms", round(p99, 1), "ms", p50_ms=round(p50, 1))


def report_ratio(name: str, above: Runs, below: Runs, **notes: Any) -> Ratio:
    """Emits the first way's requests a second over the second's."""
    found = ratio(rates(above), rates(below))
    shown = [round(run.requests_s, 2) for run in above], [round(run.requests_s, 2) for run in below]
    figures.emit(name, round(found.value, 4), "ratio", ci95=round(found.ci95, 4), req_s=shown, **notes)
    return found
