"""The ladder's results as tables in docs/ladder.md, and the figures `ladder.*`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import Path
from typing import Any

import report
from figures import ROOT

from bench.ladder_rungs import EAGER_DECODER, GPU_ONLY, NAMES, ROWS_ON_CPU, RUNGS, jobs, kept_ways

RESULTS = ROOT / "loadtest" / "results" / "ladder.jsonl"
PAGE = ROOT / "docs" / "ladder.md"
SEED = 3.05
"""What all optimisations of the report gave that this project repeats, on its authors' own job and machine."""
TAKEN = ("machine", "commit", "date", "versions")
"""What a figure says of where it was taken, in place of where this report is written."""
NORMAL = 1.96  # of a standard deviation, for 95 %
KINDS = {"equal": "At equal tokens", "policy": "By the tile policy"}

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Ladder:
    """The newest lines: ``loops`` of transformers by batch size, ``speeds`` and ``recalls`` by rung and job."""

    loops: Mapping[int, Line]
    speeds: Mapping[tuple[str, str], Line]
    recalls: Mapping[tuple[str, str], Line]

    @classmethod
    def read(cls, file: Path) -> Ladder:
        """Raises ValueError for lines that are not what they are called."""
        loops, speeds, recalls = {}, {}, {}
        for line in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
            place = line["rung"], line["job"]
            if "recall" in line:
                recalls[place] = line
            elif "batch" in line:
                loops[line["batch"]] = line
            else:
                speeds[place] = line
        ladder = cls(loops, speeds, recalls)
        ladder._check()
        return ladder

    def _check(self) -> None:
        equal = [*self.loops.values(), *(line for (_, kind), line in self.speeds.items() if kind == "equal")]
        if len({(line["prompt_tokens"], line["tokens"]) for line in equal}) > 1:
            told = {(line["rung"], line["prompt_tokens"], line["tokens"]) for line in equal}
            raise ValueError(f"tokens of the prompt and the answer, which should be equal, are not: {sorted(told)}")
        for (rung, kind), line in self.speeds.items():
            if "watts" not in line:  # on a CPU none of these says anything
                continue
            ways, on_cpu, graphs = kept_ways(rung), line["embeddings_on_cpu"], line["graph_steps"]
            if (on_cpu > 0) != (ROWS_ON_CPU in ways) or (graphs > 0 and EAGER_DECODER in ways):
                raise ValueError(
                    f"the server of {rung} ({kind}) did not work as its rung says: {on_cpu} requests' rows came over "
                    f"the CPU, {graphs} of its steps ran as CUDA graphs"
                )

    @property
    def feet(self) -> tuple[Line, Line] | None:
        """transformers at batch 1, and at its best batch."""
        best = max(self.loops.values(), key=lambda line: line["req_s"], default=None)
        return None if best is None or 1 not in self.loops else (self.loops[1], best)

    def best(self, kind: str) -> Line | None:
        """The fastest rung."""
        lines = [line for (_, asked), line in self.speeds.items() if asked == kind]
        return max(lines, key=lambda line: line["req_s"], default=None)

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
        for kind, prefix in (("equal", "ladder.equal_tokens.over"), ("policy", "ladder.top_over")):
            best = self.best(kind)
            if best is None or self.feet is None:
                continue
            for foot, name in zip(self.feet, ("start", "best")):
                value = best["req_s"] / foot["req_s"]
                ci95 = value * hypot(best["ci95"] / best["req_s"], foot["ci95"] / foot["req_s"])
                notes = {"rung": best["rung"], "req_s": best["req_s"], "of": foot["req_s"], "batch": foot["batch"]}
                notes |= {name: best[name] for name in TAKEN}
                yield f"{prefix}_{name}", round(value, 2), "ratio", {**notes, "ci95": round(ci95, 2)}
        top = self.best("policy")
        below = self.recalls.get(("transformers", "equal"))
        own = top and self.recall(top["rung"], "policy")
        start = self.recalls.get(("start", "equal"))
        if own and (below is None or below["questions"] != own["questions"]):
            below = start
        if own and below and below["questions"] == own["questions"]:
            drop, margin = drop_points(below, own)
            notes = {name: own[name] for name in TAKEN}
            notes |= {"rung": top["rung"], "below": below["rung"], "questions": own["questions"]}
            yield "ladder.recall_drop", round(drop, 3), "points", {**notes, "ci95": round(margin, 3)}


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
    "req/s",
    "QPM",
    "ms/token",
    "p50, p99 ms",
    "preprocess, ViT ms",
    "in flight",
    "GPU busy",
    "W",
    "times batch 1",
    "times best batch",
    "recall (95 %)",
    "that report's own",
)


def tables(ladder: Ladder) -> str:
    """Markdown: a table for each job, and what they were measured on."""
    parts = []
    for kind, title in KINDS.items():
        rows = [f"### {title}\n", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        if kind == "equal" and ladder.feet:
            titles = ("plain `transformers` loop, batch 1", f"its best batch, {ladder.feet[1]['batch']}")
            known = ladder.recalls.get(("transformers", kind))
            rows += [row(name, line, ladder, known) for name, line in zip(titles, ladder.feet)]
        for name in NAMES:
            if kind in jobs(name):
                rung, line = RUNGS[name], ladder.speeds.get((name, kind))
                rows.append(row(rung.title, line, ladder, ladder.recall(name, kind), rung.seed))
        rows.append(f"| all of it |{' |' * (len(HEAD) - 2)} **{SEED}** times |")
        parts.append("\n".join(rows) + "\n")
    tried = ", ".join(f"{batch}: {line['req_s']:.2f}" for batch, line in sorted(ladder.loops.items()))
    if tried:
        parts.append(f"`transformers` at each batch size, req/s: {tried}.\n")
    for what, lines in (
        ("Speed", [*ladder.loops.values(), *ladder.speeds.values()]),
        ("Recall", ladder.recalls.values()),
    ):
        places = sorted({f"{line['machine']} ({line['commit']}, {line['date']})" for line in lines})
        parts.append(f"{what}: {'; '.join(places) or 'not measured yet'}.\n")
    return "\n".join(parts)


def row(title: str, line: Line | None, ladder: Ladder, known: Line | None, seed: str = "") -> str:
    """A line of a table."""
    cells = [title, *(["not measured yet"] + [""] * 9 if line is None else speed_cells(line, ladder))]
    return f"| {' | '.join([*cells, '' if known is None else recall_cell(known), seed])} |"


def speed_cells(line: Line, ladder: Ladder) -> list[str]:
    drawn = [f"{100 * line['busy']:.0f}%", f"{line['watts']:.0f}"] if "watts" in line else ["", ""]
    stages = line.get("stages_p50")
    return [
        f"{line['req_s']:.2f} ± {line['ci95']:.2f}",
        f"{60 * line['req_s']:.0f}",
        f"{line['p50_ms'] / line['tokens']:.0f}" if line["tokens"] else "",
        f"{line['p50_ms']:.0f}, {line['p99_ms']:.0f}",
        f"{stages['preprocess_ms']:.0f}, {stages['vision_ms']:.0f}" if stages else "",
        f"{line['concurrency']}",
        *drawn,
        *([f"{line['req_s'] / foot['req_s']:.2f}" for foot in ladder.feet] if ladder.feet else ["", ""]),
    ]


def recall_cell(line: Line) -> str:
    low, high = share_interval(line["questions"] - len(line["wrong"]), line["questions"])
    return f"{100 * line['recall']:.2f}% ({100 * low:.2f} to {100 * high:.2f})"


def update(ladder: Ladder, check: bool = False) -> bool:
    """Writes the page, unless it is only to be checked; whether that changes it."""
    return report.write(PAGE, tables(ladder), check)
