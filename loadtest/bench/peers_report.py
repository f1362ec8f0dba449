"""Other engines beside ours: the recorded pairs as tables in README.md and docs/peers.md, and the figures `peers.*`.

A line of results/peers.jsonl is a pair: a workload that an engine and our server were asked in one turn, the same
pictures, one after the other on one machine. Of the pairs of an engine's version on a workload those count that have
the commit, machine and settings of the last. Those of 2026-11-23 were taken before the command was there.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
from turns import ratio
from workloads import WORKLOADS

PAGE = figures.ROOT / "docs" / "peers.md"
RESULTS = figures.RESULTS.with_name("peers.jsonl")
TITLES = {
    "W1": "448x448 photo, 4 tokens out, 256 at once",
    "W2": "480x320 photo in 7 tiles, 4 tokens out, 256 at once",
    "W4a": "448x448 photo, 256 tokens out, 64 at once",
    "W4b": "448x448 photo, 256 tokens out, 10 at once",
    "W5b": "MinerU2.5: 448x448 photo, 4 tokens out, 256 at once",
}
"""The workloads in README.md's table."""
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy"}
FORMS = {"bf16": "bf16", "fp8": "FP8"}
SIDES = {"ours": "Tessera", "theirs": "the engine"}

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Standing:
    """A version of an engine beside ours on one workload: its pairs that count, the newest last."""

    pairs: Sequence[Line]

    @property
    def newest(self) -> Line:
        return self.pairs[-1]

    @property
    def shape(self) -> str:
        """Of the model, where it is not the one that the workload is of."""
        usual = "mineru25" if WORKLOADS[self.newest["workload"]].figures == "docs" else "internvl3-8b"
        return "" if self.newest["shape"] == usual else self.newest["shape"]

    @property
    def name(self) -> str:
        """What its figures are called, without what each is."""
        line = self.newest
        return ".".join(filter(None, ["peers", line["engine"], line["workload"], self.shape, line["form"]]))

    @property
    def title(self) -> str:
        return " ".join(filter(None, [self.newest["workload"], self.shape, FORMS[self.newest["form"]]]))

    @property
    def engine(self) -> str:
        """With its version."""
        return f"{ENGINES.get(self.newest['engine'], self.newest['engine'])} {self.newest['version']}"

    def all(self, side: str, what: str = "rate") -> list[float]:
        """Of the pairs that say it."""
        return [pair[side][what] for pair in self.pairs if what in pair[side]]

    def mean(self, side: str, what: str = "rate") -> float | None:
        found = self.all(side, what)
        return fmean(found) if found else None

    @property
    def ratio(self) -> tuple[float, float | None]:
        """Ours over theirs, and half its 95 % interval by the turns; None where there was one."""
        ours, theirs = self.all("ours"), self.all("theirs")
        return (ours[0] / theirs[0], None) if len(ours) == 1 else tuple(ratio(ours, theirs))

    @property
    def ahead(self) -> str:
        """ours, theirs, or neither where the interval has room for both."""
        value, ci95 = self.ratio
        return "neither" if abs(value - 1) <= (ci95 or 0.0) else "ours" if value > 1 else "theirs"

    def figures(self) -> Iterator[tuple[str, float, str, dict[str, object]]]:
        """(name, value, unit, notes): the ratio, their rate, and their joules over ours."""
        value, ci95 = self.ratio
        line, unit = self.newest, self.newest["unit"]
        notes = {"turns": len(self.pairs), "version": line["version"], "ahead": self.ahead, "shape": line["shape"]}
        notes |= {side: self.all(side) for side in SIDES}
        for what in ("watts", "mhz", "joules", "ttft_p50_ms"):
            notes |= {f"{side}_{what}": round(mean, 2) for side in SIDES if (mean := self.mean(side, what)) is not None}
        sure = {} if ci95 is None else {"ci95": round(ci95, 4)}
        yield f"{self.name}.ratio", round(value, 4), "ratio", notes | sure
        yield f"{self.name}.{unit.replace('/', '_')}", round(fmean(self.all("theirs")), 2), unit, {}
        ours, theirs = (self.mean(side, "joules") for side in SIDES)
        if ours and theirs:
            yield f"{self.name}.joules_ratio", round(theirs / ours, 3), "theirs/ours", {}


def read(file: Path = RESULTS) -> list[Standing]:
    """In the order of the workloads, forms, engines and versions, the newest version last."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def place(line: Line) -> tuple[Any, ...]:
        return (
            list(WORKLOADS).index(line["workload"]),
            line["shape"],
            list(FORMS).index(line["form"]),
            column(line),
        )

    def taken(line: Line) -> tuple[object, ...]:
        commit = (line["commit"] or "").removesuffix("-dirty")  # as the results themselves make it
        return line["machine"], commit, line.get("settings"), line.get("flags")

    standings = []
    for _, group in groupby(sorted(lines, key=place), place):
        pairs = list(group)
        standings.append(Standing([pair for pair in pairs if taken(pair) == taken(pairs[-1])]))
    return standings


def column(line: Line) -> tuple[int, str, list[int]]:
    """Where an engine's version stands beside others."""
    known, engine = list(ENGINES), line["engine"]
    version = [int(number) for number in re.findall(r"\d+", line["version"])]
    return known.index(engine) if engine in known else len(known), engine, version


def comparison(standings: Iterable[Standing]) -> str:
    """README.md's table: the newest pairs with vLLM."""
    found = {
        (each.newest["workload"], each.newest["form"]): each
        for each in standings
        if each.newest["engine"] == "vllm" and each.newest["workload"] in TITLES and not each.shape
    }
    heads = [head for form in FORMS.values() for head in (f"Tessera {form}", f"vLLM {form}", "ratio")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for workload, words in TITLES.items():
        cells = [words]
        for form in FORMS:
            pair = found.get((workload, form))
            cells += [*rates(pair), f"{pair.ratio[0]:.2f}"] if pair else [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    taken = sorted(
        {"vLLM {version} beside Tessera {commit} on {machine}, {date}".format(**each.newest) for each in found.values()}
    )
    notes = [
        f"{TITLES[workload]}: {line['note']}"
        for (workload, _), each in found.items()
        if "note" in (line := each.newest)
    ]
    return "\n".join([*lines, "", f"{'; '.join([*taken, *notes])}."]) + "\n"


def rates(standing: Standing) -> list[str]:
    """Ours and theirs."""
    return [rate(fmean(standing.all(side)), standing.newest["unit"]) for side in SIDES]


def rate(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def page(standings: Sequence[Standing]) -> str:
    """docs/peers.md's tables: who is ahead where, and what each drew and took to the first token."""
    count = {who: [each for each in standings if each.ahead == who] for who in ("ours", "theirs", "neither")}
    lost = ", ".join(f"{each.title} ({each.engine})" for each in count["theirs"])
    once = sum(len(each.pairs) == 1 for each in standings)
    losses = f" ({lost})" if lost else ""
    engines = list(dict.fromkeys(each.engine for each in sorted(standings, key=lambda each: column(each.newest))))
    lines = [
        f"Of {len(standings)} pairs Tessera is ahead in {len(count['ours'])}, behind in {len(count['theirs'])}"
        f"{losses}, and {len(count['neither'])} cannot be told apart by their intervals; "
        f"{once} were taken once, without one.",
        "",
        "| workload | " + " | ".join(f"Tessera, {name} | ours / theirs | ahead" for name in engines) + " |",
        "|---" * (1 + 3 * len(engines)) + "|",
    ]
    for workload, row in groupby(standings, lambda each: each.title):
        by_engine = {each.engine: each for each in row}
        cells = [cell for engine in engines for cell in pair_cells(by_engine.get(engine))]
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    known = {each.newest["engine"] for each in standings}
    if missing := [name for engine, name in ENGINES.items() if engine not in known]:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    heads = ("J a request", "W", "MHz", "ms to the first token", "turns", "machine", "commit", "date", "")
    lines += [
        "",
        "Each cell: Tessera, then the engine.",
        "",
        f"| | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
    ]
    for each in standings:
        line, whats = each.newest, ("joules", "watts", "mhz", "ttft_p50_ms")
        cells = [both(each, what) for what in whats] + [f"{len(each.pairs)}"]
        cells += [line[key] for key in ("machine", "commit", "date")] + [line.get("note", "")]
        lines.append(f"| {each.title}, {each.engine} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pair_cells(standing: Standing | None) -> list[str]:
    if standing is None:
        return [""] * 3
    value, ci95 = standing.ratio
    return [", ".join(rates(standing)), f"{value:.3g}" + (f" ± {ci95:.2g}" if ci95 is not None else ""), standing.ahead]


def both(standing: Standing, what: str) -> str:
    """Ours and theirs, where either says it."""
    means = [standing.mean(side, what) for side in SIDES]
    return "" if means == [None, None] else ", ".join("-" if mean is None else f"{mean:.4g}" for mean in means)
