"""What a cascade promises, held against answers that were given both ways (`make bench NAME=cascade`; docs/cascade.md).

Of the rows that `cascade_rows` keeps, on one CPU core, in a minute. `--parts`:

- bound: 200 draws of 2,000 pictures (with replacement, so that the set itself is the truth) plan a cascade at 0.5, 1
  and 2 % and 95 % confidence: in how many of them more of the whole set differs than was stated.
  `cascade.bound_broken_pct` is the worst of the sets and shares; each has its own figure, with the share escalated,
  recall and tokens. By chance alone 200 draws of 5 % reach 8 % once in forty times.
- alarm: watches planned on 2,000 drawn pictures. `cascade.alarm_requests`: by when 95 % of them have raised the alarm
  after the share escalated went from 5 to 10 %, `cascade.audit_over_bound`: audits on average until a doubled rate of
  disagreement is found, by ln(average run) / KL, and `cascade.false_alarms_per_100k` of both tests together.
- shifts: the same for pictures in the dark, blurred, and as JPEG 30.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import figures
import numpy as np

from bench.cascade_rows import DESCRIBES, FIRST_RIGHT, FULL_RIGHT, ROWS, SAME
from tessera.cascade import AVERAGE_RUN, Plan, Watch
from tessera_evaluation import cascade
from tessera_evaluation.cascade import Pair
from tessera_evaluation.charts import Chart, ticks
from tessera_wire.errors import InvalidRequest

SHARES, CONFIDENCE = (0.005, 0.01, 0.02), 0.95
DRAWS, PLANNED_ON = 200, 2000
TILE_TOKENS = 64
PERCENT_AUDITED = (1, 10)
LONGEST = 50_000
"""Requests after which a watch that has raised no alarm is given up."""


def pairs(rows: np.ndarray) -> list[Pair]:
    return [
        Pair("", float(margin), not flags & SAME, TILE_TOKENS, TILE_TOKENS * int(tiles), _right(int(flags)))
        for margin, tiles, flags in rows
    ]


def _right(flags: int) -> tuple[bool, bool] | None:
    return None if flags & DESCRIBES else (bool(flags & FIRST_RIGHT), bool(flags & FULL_RIGHT))


def bound_part(sets: dict[str, list[Pair]], draws: int) -> dict[tuple[str, float], dict[str, float]]:
    """Emits the figures; returns what the plans of each set and share do on average."""
    worst, means = 0.0, {}
    for name in ("rooms", "small"):
        known = sets[name]
        for share in SHARES:
            found, refused = [], 0
            for seed in range(draws):
                try:
                    policy = cascade.plan(Random(seed).choices(known, k=PLANNED_ON), share, CONFIDENCE)
                except InvalidRequest:  # all would be escalated: nothing differs
                    refused += 1
                    continue
                found.append(on_all(known, policy["margin"]))
            broken = 100 * sum(each["differ"] > share for each in found) / draws
            worst = max(worst, broken)
            about = {key: round(fmean(each[key] for each in found), 5) for key in found[0]} if found else {}
            about |= {"differ_without": round(fmean(pair.differs for pair in known), 5), "refused": refused}
            metric = f"cascade.bound.{name}.{100 * share:g}pct.broken_pct"
            figures.emit(metric, round(broken, 2), "%", pictures=len(known), draws=draws, **about)
            means[name, share] = about
    figures.emit("cascade.bound_broken_pct", round(worst, 2), "%", draws=draws, planned_on=PLANNED_ON, at_most=8)
    return means


def on_all(known: Sequence[Pair], margin: float) -> dict[str, float]:
    """What a threshold does on the whole set: shares, and image tokens a question."""
    up = [pair.margin < margin for pair in known]
    labelled = [pair.right[each] for pair, each in zip(known, up) if pair.right is not None]
    full = fmean(pair.full_tokens for pair in known)
    return {
        "differ": fmean(pair.differs and not each for pair, each in zip(known, up)),
        "escalated": fmean(up),
        "recall": fmean(labelled),
        "recall_full": fmean(pair.right[1] for pair in known if pair.right is not None),
        "tokens": fmean(pair.first_tokens + each * pair.full_tokens for pair, each in zip(known, up)),
        "tokens_full": full,
    }


def plot(sets: dict[str, list[Pair]], means: dict[tuple[str, float], dict[str, float]]) -> str:
    """What differs by what is escalated, of each set at every threshold, and the plans at each share, as SVG."""
    colours = {"rooms": "#2c6fbb", "small": "#c0392b"}
    highest = 100 * max(fmean(pair.differs for pair in sets[name]) for name in colours)
    chart = Chart((760, 440), (60, 720, 60, 370), (0, 100), (0, 1.1 * highest))
    chart.text(20, 24, "How far one tile is enough, and what plans of 2,000 pictures choose", size="14")
    chart.text(20, 44, "% of all answers that differ from the full cut's")
    chart.axes(ticks(0, 100), ticks(0, 1.1 * highest), "% escalated")
    for row, (name, colour) in enumerate(colours.items()):
        ordered = sorted(sets[name], key=lambda pair: pair.margin)
        left, curve = sum(pair.differs for pair in ordered), []
        for place, pair in enumerate(ordered):
            if place % (len(ordered) // 100) == 0:
                curve.append((100 * place / len(ordered), 100 * left / len(ordered)))
            left -= pair.differs
        chart.curve([*curve, (100, 0)], colour, 2)
        chart.text(700, 80 + 18 * row, f"{name}: {len(ordered)} pictures", "end", colour)
        for share in SHARES:
            found = means.get((name, share), {})
            if "escalated" in found:
                x, y = chart.x(100 * found["escalated"]), chart.y(100 * found["differ"])
                chart.dot(x, y, "white", colour)
                chart.text(x, y + 4, f"{100 * share:g}", "middle", colour, size="10")
    return chart.svg()


def escalating(known: Sequence[Pair], share: float) -> float:
    """The threshold under which this share of the set lies."""
    return float(np.quantile([pair.margin for pair in known], share))


def planned(known: Sequence[Pair], margin: float, share: float, dice: Random) -> Plan:
    """What a plan on drawn pictures tells its watch at a given threshold."""
    drawn = dice.choices(known, k=PLANNED_ON)
    return Plan.read(cascade.watched(drawn, [pair.margin < margin for pair in drawn], share, CONFIDENCE))


def follow(watch: Watch, deal: Callable[[], Pair], margin: float, audit: float, dice: Random) -> str:
    """Answers requests until an alarm is raised or LONGEST have passed; returns what the alarm is."""
    while not watch.alarm and watch.requests < LONGEST:
        pair = deal()
        escalated = pair.margin < margin
        watch.request(pair.margin, escalated)
        if not escalated and dice.random() < audit:
            watch.audited(pair.differs)
    return watch.alarm


def alarm_part(known: Sequence[Pair], runs: int) -> None:
    """With the set's own margins, at the threshold under which a twentieth of them lies."""
    margin = escalating(known, 0.05)
    up, kept = [pair for pair in known if pair.margin < margin], [pair for pair in known if pair.margin >= margin]
    spent = []
    for seed in range(runs):
        dice = Random(seed)
        watch = Watch(planned(known, margin, 0.01, dice))
        follow(watch, lambda: dice.choice(up if dice.random() < 0.1 else kept), margin, 0.0, dice)  # noqa: B023
        spent.append(watch.requests)
    by_then = sorted(spent)[int(0.95 * runs)]
    about = {"mean": round(fmean(spent)), "runs": runs, "planned_on": PLANNED_ON, "at_most": 2000}
    figures.emit("cascade.alarm_requests", by_then, "requests", **about)
    audits_part(known, margin, runs)
    false_alarms_part(known, margin, runs)


def audits_part(known: Sequence[Pair], margin: float, runs: int) -> None:
    """At twice the promised rate of disagreement."""
    usual = planned(known, margin, 0.01, Random(0)).disagreed.limit
    rate = 2 * usual
    soonest = log(AVERAGE_RUN) / (rate * log(rate / usual) + (1 - rate) * log((1 - rate) / (1 - usual)))
    spent = []
    for seed in range(runs):
        dice = Random(seed)
        watch = Watch(planned(known, margin, 0.01, Random(0)))
        while not watch.audited(dice.random() < rate):
            pass
        spent.append(watch.audits)
    about = {"runs": runs, "audits": round(fmean(spent)), "information_bound": round(soonest), "rate": round(rate, 5)}
    figures.emit("cascade.audit_over_bound", round(fmean(spent) / soonest, 3), "ratio", at_most=1.5, **about)
    for percent in PERCENT_AUDITED:
        audited = percent / 100 * fmean(pair.margin >= margin for pair in known)
        about = {"information_bound": round(soonest / audited)}
        metric = f"cascade.audit_requests.{percent}pct"
        figures.emit(metric, round(fmean(spent) / audited), "requests", **about)


def false_alarms_part(known: Sequence[Pair], margin: float, runs: int) -> None:
    """Runs of 100,000 requests such as were planned on, a tenth of them audited at the promised rate itself."""
    alarms, audits = 0, 0
    for seed in range(runs):
        dice = Random(seed)
        plan = planned(known, margin, 0.01, dice)
        watch = Watch(plan)
        for pair in dice.choices(known, k=100_000):
            escalated = pair.margin < margin
            watch.request(pair.margin, escalated)
            if not escalated and dice.random() < 0.1:
                audits += 1
                watch.audited(dice.random() < plan.disagreed.limit)
            if watch.alarm:
                alarms, watch = alarms + 1, Watch(plan)
    about = {"requests": 100_000 * runs, "audits": audits, "alarms": alarms, "at_most": 1}
    figures.emit("cascade.false_alarms_per_100k", round(alarms / runs, 3), "alarms", **about)


def shifts_part(sets: dict[str, list[Pair]], runs: int) -> None:
    """Planned on the rooms as they are, at 1 %, a tenth audited."""
    known = sets["rooms"]
    for name in ("dark", "blurred", "jpeg30"):
        spent, told, margins = [], [], []
        for seed in range(runs):
            dice = Random(seed)
            margins.append(cascade.plan(dice.choices(known, k=PLANNED_ON), 0.01, CONFIDENCE)["margin"])
            watch = Watch(planned(known, margins[-1], 0.01, dice))
            told.append(follow(watch, lambda: dice.choice(sets[name]), margins[-1], 0.1, dice))  # noqa: B023
            spent.append(watch.requests)
        now = [on_all(sets[name], margin) for margin in margins]
        about: dict[str, Any] = {key: round(fmean(each[key] for each in now), 4) for key in now[0]}
        by = {" ".join(words.split()[:2]) for words in told}
        about |= {"runs": runs, "alarms": sum(map(bool, told)), "by": sorted(by - {""}), "pictures": len(sets[name])}
        figures.emit(f"cascade.shift.{name}.alarm_requests", round(fmean(spent)), "requests", **about)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("bound", "alarm", "shifts")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="of the part bound")
    options = parser.parse_args()
    sets = {name: pairs(rows) for name, rows in np.load(ROWS).items()}
    if "bound" in options.parts:
        means = bound_part(sets, options.draws)
        if options.plot:
            options.plot.write_text(plot(sets, means), encoding="utf-8")
    if "alarm" in options.parts:
        alarm_part(sets["small"], options.draws)
    if "shifts" in options.parts:
        shifts_part(sets, max(1, options.draws // 10))
    return 0
