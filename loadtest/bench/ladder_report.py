"""The ladder's results as tables in docs/ladder.md, and the figures `ladder.*`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import report
from figures import ROOT
from turns import Ratio, chained, ratio

from bench.ladder_rungs import FLIGHTS, GPU_ONLY, KINDS, NAMES, RUNGS, TRANSFORMERS, Pair, jobs, pairs, steps

RESULTS = ROOT / "loadtest" / "results" / "ladder.jsonl"
PAGE = ROOT / "docs" / "ladder.md"
SEED = 3.05
"""What all optimisations of the report gave that this project repeats, on its authors' own job and machine."""
TAKEN = ("machine", "commit", "date", "versions")
"""What a figure says of where it was taken, in place of where this report is written."""
NORMAL = 1.96  # of a standard deviation, for 95 %
MISSING = "not measured yet"

Line = Mapping[str, Any]
Cell = tuple[Pair, str]
"""A pair, and with how many requests in flight."""


@dataclass(frozen=True)
class Ladder:
    """The newest lines: ``cells`` of speed, see :func:`together`, and ``recalls`` by rung and job."""

    cells: Mapping[Cell, Line]
    recalls: Mapping[tuple[str, str], Line]

    @classmethod
    def read(cls, file: Path) -> Ladder:
        speeds, recalls = defaultdict[Cell, list[Line]](list), {}
        for line in lines(file):
            if "recall" in line:
                recalls[line["rung"], line["job"]] = line
            else:
                speeds[Pair(line["rung"], line["below"], line["job"]), line["flight"]].append(line)
        return cls({cell: together(all_of) for cell, all_of in speeds.items()}, recalls)

    def ratio(self, cell: Cell) -> Ratio | None:
        line = self.cells.get(cell)
        return None if line is None else Ratio(line["ratio"], line["ci95"])

    def chain(self, kind: str, flight: str, rung: str) -> Ratio | None:
        """How many times the foot of the ladder a rung is, by the product of all up to it; None where one lacks."""
        way = steps(kind)
        ratios = [self.ratio((pair, flight)) for pair in way[: [pair.rung for pair in way].index(rung) + 1]]
        known = [ratio for ratio in ratios if ratio is not None]
        return chained(known) if len(known) == len(ratios) else None

    def recall(self, rung: str, kind: str) -> Line | None:
        """The recall of a rung, or of the one below that it shares all numbers with."""
        for name in reversed(NAMES[: NAMES.index(rung) + 1]):
            if kind in jobs(name):
                if line := self.recalls.get((name, kind)):
                    return line
                if name not in GPU_ONLY:
                    break
        return None

    def figures(self) -> Iterator[tuple[str, float, str, dict[str, object]]]:
        """(metric, value, unit, notes) of all there are."""
        every = [(pair, flight) for pair in pairs() for flight in FLIGHTS]
        if all(cell in self.cells for cell in every):
            widest = max(every, key=lambda cell: self.cells[cell]["ci95"] / self.cells[cell]["ratio"])
            line = self.cells[widest]
            notes = {name: line[name] for name in ("rung", "below", "job", "flight", "turns", *TAKEN)}
            share = round(100 * line["ci95"] / line["ratio"], 2)
            yield "ladder.widest_ratio_interval_pct", share, "%", {**notes, "ratios": len(every)}
        for pair in pairs():
            prefix = {"equal": "ladder.equal_tokens.over", "policy": "ladder.top_over"}.get(pair.kind)
            for flight, foot in zip(FLIGHTS, ("best", "one")):
                line = self.cells.get((pair, flight))
                if not pair.ends or line is None:
                    continue
                notes = {name: line[name] for name in ("rung", "req_s", "p50_ms", "in_flight", "turns", *TAKEN)}
                if whole := self.chain(pair.kind, flight, pair.rung):
                    notes |= {"chained": round(whole.value, 3), "chained_ci95": round(whole.ci95, 3)}
                yield f"{prefix}_{foot}", round(line["ratio"], 3), "ratio", {**notes, "ci95": round(line["ci95"], 3)}
        own = self.recall(NAMES[-1], "policy")
        below = self.recalls.get((TRANSFORMERS, "equal"))
        if own and (below is None or below["questions"] != own["questions"]):
            below = self.recalls.get((NAMES[0], "equal"))
        if own and below and below["questions"] == own["questions"]:
            drop, margin = drop_points(below, own)
            notes = {name: own[name] for name in TAKEN}
            notes |= {"rung": own["rung"], "below": below["rung"], "questions": own["questions"]}
            yield "ladder.recall_drop", round(drop, 3), "points", {**notes, "ci95": round(margin, 3)}


def lines(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def together(lines: Sequence[Line]) -> Line:
    """A pair's newest line, by the turns of all that were taken on its machine at its commit: one card may take half of
    them, and another the other half."""
    alike = _alike(lines)
    if len(alike) == 1:
        return lines[-1]
    by_turn = [turn for line in alike for turn in line["by_turn"]]
    found, weights = ratio(by_turn, [1.0] * len(by_turn)), [line["turns"] for line in alike]
    means = {
        name: [fmean(side, weights) for side in zip(*(line[name] for line in alike))]
        for name in ("req_s", "p50_ms", "watts")
        if all(name in line for line in alike)
    }
    return {**lines[-1], **means, "ratio": found.value, "ci95": found.ci95, "turns": len(by_turn)}


def _alike(lines: Sequence[Line]) -> list[Line]:
    """The newest line of a place and those that count with it, which is last."""
    newest = lines[-1]
    if "by_turn" not in newest:
        return [newest]
    same = ("machine", "commit", "in_flight")
    return [line for line in lines if "by_turn" in line and all(line[name] == newest[name] for name in same)]


def prune(file: Path) -> None:
    """Leaves the newest line of each place, and those that count with it."""
    places = defaultdict[tuple[object, ...], list[Line]](list)
    for line in lines(file):
        places["recall" in line, line["rung"], line.get("below"), line["job"], line.get("flight")].append(line)
    kept = [line for each in places.values() for line in _alike(each)]
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))


def drop_points(below: Line, above: Line) -> tuple[float, float]:
    """How many points fewer of the same questions are right above, and half its 95 % interval (Bonett and Price's, for
    paired shares)."""
    lost, won = len({*above["wrong"]} - {*below["wrong"]}), len({*below["wrong"]} - {*above["wrong"]})
    count = below["questions"] + 2
    losses, wins = (lost + 1) / count, (won + 1) / count
    margin = NORMAL * sqrt((losses + wins - (losses - wins) ** 2) / count)
    return 100 * (lost - won) / below["questions"], 100 * margin


def share_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = right / count, NORMAL**2 / count
    middle, half = share + square / 2, NORMAL * sqrt(share * (1 - share) / count + square / (4 * count))
    return (middle - half) / (1 + square), min(1.0, (middle + half) / (1 + square))


HEAD = (
    "rung",
    "many in flight: times the one below",
    "times the loop",
    "in flight",
    "req/s",
    "W",
    "one in flight: times the one below",
    "times the loop",
    "ms",
    "recall (95 %)",
    "that report's own",
)


def tables(ladder: Ladder) -> str:
    """Markdown: a table for each job, what gave nothing, and what all was measured on."""
    parts = []
    for kind, title in KINDS.items():
        rows = [f"### {title}\n", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        if kind == "equal":
            known = ladder.recalls.get((TRANSFORMERS, kind))
            rows.append(row("plain loop of `transformers`", [""] * 8, known))
        for pair in pairs():
            if pair.kind == kind and not pair.ends:
                rung, known = RUNGS[pair.rung], ladder.recall(pair.rung, kind)
                rows.append(row(rung.title, speed_cells(pair, ladder), known, rung.seed))
        for pair in pairs():
            if pair.kind == kind and pair.ends:
                chain = (ladder.chain(kind, flight, pair.rung) for flight in FLIGHTS)
                many, one = (MISSING if each is None else f"**{each}**" for each in chain)
                rows.append(
                    row("all of it: the product", ["", many, "", "", "", "", one, ""], None, f"**{SEED}** times")
                )
                rows.append(row("all of it: top and foot in turns", speed_cells(pair, ladder, whole=True), None))
        parts.append("\n".join(rows) + "\n")
    if nothing := [words for pair in pairs() for flight in FLIGHTS if (words := gives_nothing(pair, flight, ladder))]:
        parts.append("Not surely faster than the rung below, and the likely reason:\n\n" + "\n".join(nothing) + "\n")
    for what, taken in (("Speed", ladder.cells.values()), ("Recall", ladder.recalls.values())):
        places = sorted({f"{line['machine']} ({line['commit']}, {line['date']})" for line in taken})
        parts.append(f"{what}: {'; '.join(places) or MISSING}.\n")
    return "\n".join(parts)


def row(title: str, cells: list[str], known: Line | None, seed: str = "") -> str:
    """A line of a table."""
    return f"| {' | '.join([title, *cells, '' if known is None else recall_cell(known), seed])} |"


def speed_cells(pair: Pair, ladder: Ladder, whole: bool = False) -> list[str]:
    """Ratio, product so far, and what both sides did, the one below first; with many in flight, then with one.
    ``whole``: the ratio is of the whole ladder, and stands where the products do."""
    cells = []
    for flight in FLIGHTS:
        line = ladder.cells.get((pair, flight))
        if line is None:
            cells += [MISSING, "", "", "", ""] if flight == "many" else [MISSING, "", ""]
            continue
        ratio, chain = f"{ladder.ratio((pair, flight))} ({line['turns']})", None
        if not whole and pair in steps(pair.kind) and pair.kind != "W6":
            chain = ladder.chain(pair.kind, flight, pair.rung)
        cells += ["", ratio] if whole else [ratio, "" if chain is None else str(chain)]
        if flight == "many":
            cells += [both(line["in_flight"], "d"), both(line["req_s"], ".2f"), both(line.get("watts", ()), ".0f")]
        else:
            cells.append(both(line["p50_ms"], ".1f"))
    return cells


def both(values: Sequence[float], form: str) -> str:
    """What the one below has and what this one has."""
    return ", ".join(format(value, form) for value in values)


def gives_nothing(pair: Pair, flight: str, ladder: Ladder) -> str:
    """Why, where a rung is not surely faster than the one below it; nothing where it is."""
    ratio = ladder.ratio((pair, flight))
    if ratio is None or ratio.sure:
        return ""
    rung, words = RUNGS[pair.rung], {"many": "many in flight", "one": "one in flight"}
    why = f": {rung.nothing}" if rung.nothing and pair.kind != "W6" else ""
    return f"- {rung.title}, {KINDS[pair.kind].lower()}, {words[flight]} ({ratio}){why}"


def recall_cell(line: Line) -> str:
    low, high = share_interval(line["questions"] - len(line["wrong"]), line["questions"])
    return f"{100 * line['recall']:.2f}% ({100 * low:.2f} to {100 * high:.2f})"


def update(ladder: Ladder, check: bool = False) -> bool:
    """Writes the page, unless it is only to be checked; whether that changes it."""
    return report.write(PAGE, tables(ladder), check)
