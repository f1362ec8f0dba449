"""Ways of serving in turns (A, B, A, B, ...) on one machine, and how sure the ratio of two of them is.

What the machine does meanwhile falls on all ways: a ratio is of each turn's pair, and its interval is by the turns.
:func:`in_turns` takes a number of turns, :func:`compare` as many as the interval asks for. Looking after every turn
ends at a narrow interval a little too often: so nothing ends before :data:`LEAST` turns. Simulated with a spread of 0.4
to 4.5 % between turns, intervals of 95 % then hold the ratio in 92 to 95 % of the cases; with two more it is the same.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import asinh, exp, hypot, log, prod, sinh
from statistics import fmean, median
from typing import Any, NamedTuple

import counting
import figures
from measuring import take
from targets import TesseraAsker
from workloads import Workload

Runs = list[counting.Run]
GOAL = 0.02
"""Half the interval of a ratio, as a share of it, that is narrow enough."""
LEAST = 4


class Ratio(NamedTuple):
    """A ratio, and half its 95 % interval."""

    value: float
    ci95: float

    @property
    def sure(self) -> bool:
        """Whether the first way is better for certain."""
        return self.value - self.ci95 > 1

    @property
    def share(self) -> float:
        """Half the interval as a share of the ratio."""
        return self.ci95 / self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.ci95:.3f}"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of two ways' rates by turns, of which there are two or more: the geometric mean of the pairs' ratios."""
    logs = [log(first / second) for first, second in zip(above, below, strict=True)]
    return _around(fmean(logs), counting.margin(logs))


def chained(ratios: Iterable[Ratio]) -> Ratio:
    """The product of ratios that were taken apart: the errors of their logarithms add up in squares."""
    ratios = list(ratios)
    return _around(log(prod(each.value for each in ratios)), hypot(*(asinh(each.share) for each in ratios)))


def _around(middle: float, half: float) -> Ratio:
    return Ratio(exp(middle), exp(middle) * sinh(half))


def in_turns(
    ways: Mapping[str, Sequence[str]], workload: Workload, turns: int, processes: int, seed: int, least: int = 0
) -> dict[str, Runs]:
    """Asks each way's servers, at these gRPC addresses, the workload in each turn, in the order given and back. Nobody
    sees a picture twice."""
    runs: dict[str, Runs] = {way: [] for way in ways}
    seeds = count(seed)
    for turn in range(turns):
        for way, addresses in list(ways.items())[:: -1 if turn % 2 else 1]:
            run = take(TesseraAsker(list(addresses), workload, next(seeds)), processes, least=least).run
            runs[way].append(run)
            told = f"{run.requests_s:.2f} req/s, p99 {1e3 * run.p99:.0f} ms"
            print(f"{workload.name}, turn {turn + 1} of {turns}, {way}: {told}", file=sys.stderr, flush=True)
    return runs


def rates(runs: Runs) -> list[float]:
    return [run.requests_s for run in runs]


def report_way(name: str, runs: Runs, **notes: Any) -> None:
    """Emits ``name.req_s`` and ``name.p99_ms`` of a way."""
    ci95 = round(counting.margin(rates(runs)), 2)
    figures.emit(f"{name}.req_s", round(fmean(rates(runs)), 2), "req/s", ci95=ci95, **notes)
    p50, p99 = (1e3 * median(getattr(run, part) for run in runs) for part in ("p50", "p99"))
    figures.emit(f"{name}.p99_ms", round(p99, 1), "ms", p50_ms=round(p50, 1))


def report_ratio(name: str, above: Runs, below: Runs, **notes: Any) -> Ratio:
    """Emits the first way's requests a second over the second's."""
    found = ratio(rates(above), rates(below))
    shown = [round(run.requests_s, 2) for run in above], [round(run.requests_s, 2) for run in below]
    figures.emit(name, round(found.value, 4), "ratio", ci95=round(found.ci95, 4), req_s=shown, **notes)
    return found


@dataclass
class Comparison:
    """Of one way ``above`` another. Each takes its turn with the pictures of a seed; ``worth`` is what is compared of
    what it then tells: more is better."""

    above: Callable[[int], Any]
    below: Callable[[int], Any]
    worth: Callable[[Any], float]
    turns: list[tuple[Any, Any]] = field(default_factory=list)
    """What they told, the one below first."""

    @property
    def by_turn(self) -> list[float]:
        """Each turn's ratio."""
        return [self.worth(above) / self.worth(below) for below, above in self.turns]

    @property
    def ratio(self) -> Ratio:
        return ratio(self.by_turn, [1.0] * len(self.turns))


def compare(compared: Mapping[str, Comparison], seconds: float, goal: float = GOAL) -> None:
    """Turns, until each ratio is known to its goal: first all that is below, then all that is above, and in the next
    turn the other way round, so that a drift of the machine favours neither. In each turn a comparison has new
    pictures, the same for both its ways; a way that it shares with one before it is asked once, with that one's. What
    has its goal leaves; after ``seconds`` no turn begins, but two are the least that has an interval.
    """
    began, left = time.monotonic(), dict(compared)
    for turn in count(1):
        seeds: dict[Callable[[int], Any], int] = {}
        for each in left.values():
            known = [seeds[way] for way in (each.above, each.below) if way in seeds]
            seed = known[0] if known else random.randrange(1 << 30)
            seeds = {each.above: seed, each.below: seed} | seeds
        ways = list(dict.fromkeys([*(each.below for each in left.values()), *(each.above for each in left.values())]))
        told = {way: way(seeds[way]) for way in (ways if turn % 2 else reversed(ways))}
        for each in left.values():
            each.turns.append((told[each.below], told[each.above]))
        late = time.monotonic() - began > seconds
        for name, each in list(left.items()) if turn > 1 else ():
            done = turn >= LEAST and each.ratio.share <= goal
            words = ", out of time" if late and not done else ""
            last = ", ".join(format(each.worth(told), ".4g") for told in each.turns[-1])
            print(f"{name}: {each.ratio} after {turn} turns{words}, last {last}", file=sys.stderr, flush=True)
            if done or late:
                del left[name]
        if not left:
            return
