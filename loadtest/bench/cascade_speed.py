"""What a cascade does a second by the share of requests that escalate, in turns with the full cut alone, on
InternVL3-8B's shape with random weights (`make bench NAME=cascade_speed`; docs/cascade.md).

Asked is W2: 480x320, 7 tiles or first one, 4 tokens, 256 in flight. Each request says by its own margin, 0 or "inf",
whether it escalates, in an order that is always the same and in which every few requests have the share. One server is
asked the full cut alone and each share, until the ratios' 95 % intervals are at most 2 % either way or --seconds are
over, two turns at least. Then all at once: 5 % that escalate, 5 % that begin with the full cut, and the rest.
`cascade.escalated_wait` is how much longer the first of these wait than the second, by the median or by p99, whichever
is worse.

    python loadtest/bench cascade_speed --gpus 0 --instances preprocess=10
    python loadtest/bench cascade_speed --gpus 0 --instances preprocess=10 --set quantization=fp8 --label fp8
    python loadtest/bench cascade_speed --gpus ""        a trial on the CPU, of the default model: `trial.cascade.*`

By the rates that are expected, the first takes 8 minutes and the second 5 to 7. With --shares 5 there are more turns in
that time, and narrower intervals.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import gcd
from statistics import fmean
from typing import Any

import figures
import turns
from closed_loop import Answered, Ask
from counting import percentile
from measuring import Taken, take
from serving import DEFAULT_CHECKPOINT, add_arguments, serve, setup, setup_notes
from targets import TesseraAsker

from bench.ladder import first_answers
from bench.ladder_rungs import SHAPE, Job

FULL = {"max_tiles": 12}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"cascade": {"margin": 0, "full": FULL}},
    "escalated": {"cascade": {"margin": "inf", "full": FULL}},
    "full": FULL,
}
"""What a request may be -> its tile policy."""
SHARES, PROMISED = (0, 5, 10, 20), 5
"""In percent; the figures of the second do not name it."""
AT_LEAST = {("bf16", 5): 90, ("bf16", 10): 74, ("fp8", 5): 142, ("fp8", 10): 118}
"""Requests a second."""
MIXED = {"escalated": 5, "full": 5, "kept": 90}
LEAST = 60
"""Steady answers, where five rounds of what is in flight are fewer: some of each way."""
WARMED_UP_BY = 64


def order(percent: Mapping[str, int], seed: int) -> list[str]:
    """Of requests, in which every few (20, where all are multiples of five) have these shares."""
    dice, unit = random.Random(seed), gcd(*percent.values())
    cards = [way for way, share in percent.items() for _ in range(share // unit)]
    return [way for _ in range(100) for way in dice.sample(cards, len(cards))]


@dataclass(frozen=True)
class MixedAsker(TesseraAsker):
    """Asks each request one of WAYS, which its answer is then marked with."""

    percent: Mapping[str, int] = field(default_factory=dict)

    @contextmanager
    def prepare(self, number: int, stock: int) -> Iterator[Ask]:
        pictures, ways = self.pictures(number, stock), cycle(order(self.percent, number))
        with self.connection() as ask:

            def ask_next() -> Any:
                way, job = next(ways), self.workload
                assert isinstance(job, Job)
                asked = replace(job, tile_policy=WAYS[way])
                return ask(pictures.deal(), asked, job.prompts[0])._replace(kind=way)

            yield ask_next


def check(addresses: list[str], job: Job) -> None:
    """Raises RuntimeError unless pictures are cut as each of WAYS says. No kernel is compiled later."""
    job = replace(job, concurrency=min(job.concurrency, WARMED_UP_BY))
    usages = {way: first_answers(addresses, replace(job, tile_policy=policy)) for way, policy in WAYS.items()}
    if usages["escalated"] != usages["full"] or usages["kept"].image_tokens >= usages["full"].image_tokens:
        raise RuntimeError(f"requests are not cut as they say: {usages}")


def report_way(name: str, found: Sequence[Taken], **notes: Any) -> list[Any]:
    """Emits a way's requests a second, p99 and joules; returns its runs."""
    runs = [taken.run for taken in found]
    turns.report_way(name, runs, turns=len(runs), **notes)
    if drawn := [taken.power.watts for taken in found if taken.power]:
        joules = fmean(drawn) / fmean(turns.rates(runs))
        figures.emit(f"{name}.joules", round(joules, 2), "J/request", watts=round(fmean(drawn), 1))
    return runs


def report_waits(name: str, steady: Sequence[Answered], **notes: Any) -> None:
    """Emits how much longer those wait that escalate than those that began with the full cut."""
    spent = {way: sorted(each.seconds for each in steady if each.kind == way) for way in MIXED}
    about: dict[str, Any] = {"requests": {way: len(seconds) for way, seconds in spent.items()}, "percent": MIXED}
    for part, share in (("p50", 0.5), ("p99", 0.99)):
        found = {way: percentile(seconds, share) for way, seconds in spent.items()}
        about[part] = round(found["escalated"] / found["full"], 3)
        about |= {f"{part}_ms": {way: round(1e3 * value, 1) for way, value in found.items()}}
    figures.emit(name, max(about["p50"], about["p99"]), "ratio", at_most=1.5, **about, **notes)


def measure(options: argparse.Namespace) -> None:
    asked, notes = setup(options), setup_notes(options)
    job = Job("W2", 480, 320, tokens=4, concurrency=options.in_flight, tile_policy=FULL)
    with serve(asked) as server:

        def turn(percent: Mapping[str, int], seed: int) -> Taken:
            # Other pictures for each share: it is one server.
            asker = MixedAsker(server.grpc, job, seed + percent.get("kept", -1), percent=percent)
            return take(asker, options.processes, asked.gpus, least=LEAST)

        check(server.grpc, job)
        full: Callable[[int], Taken] = partial(turn, {"full": 100})
        compared = {
            share: turns.Comparison(
                partial(turn, {"escalated": share, "kept": 100 - share}), full, lambda taken: taken.run.requests_s
            )
            for share in options.shares
        }
        turns.compare({f"{share} % over full": each for share, each in compared.items()}, options.seconds)
        mixed = turn(MIXED, random.randrange(1 << 30))
    trial, notes = "" if asked.gpus else "trial.", notes | {"concurrency": job.concurrency}
    base = f"{trial}cascade.W2.{options.label}"
    longest = max(compared.values(), key=lambda each: len(each.turns))
    report_way(f"{base}.full", [below for below, _ in longest.turns], **notes)
    for share, each in compared.items():
        name, bar = base if share == PROMISED else f"{base}.share{share}", AT_LEAST.get((options.label, share))
        below, above = zip(*each.turns)
        runs = report_way(name, above, escalated_pct=share, at_least=bar, **notes)
        turns.report_ratio(f"{name}.over_full", runs, [taken.run for taken in below])
    label = f".{options.label}" * (options.label != "bf16")
    report_waits(f"{trial}cascade.escalated_wait{label}", mixed.steady, **notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, metavar="PERCENT", help="that escalate")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no turn begins")
    parser.add_argument("--in-flight", type=int, help="requests (256; on the CPU 2)")
    parser.add_argument("--processes", type=int, default=6, help="of the load")
    parser.add_argument("--label", help="of the figures; default: bf16, or cpu")
    add_arguments(parser)
    parser.set_defaults(checkpoint=None, weights=None)
    options = parser.parse_args()
    on_gpu = (SHAPE, "random", 256, "bf16")
    usual = on_gpu if options.gpus else (DEFAULT_CHECKPOINT, "checkpoint", 2, "cpu")
    for name, value in zip(("checkpoint", "weights", "in_flight", "label"), usual):
        setattr(options, name, getattr(options, name) or value)
    measure(options)
    return 0
