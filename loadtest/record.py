"""Puts the figures in a benchmark's output into results/metrics.jsonl, each in place of the one of that name before it
(git keeps those), and writes the documents' tables again.

    make bench NAME=recall | .venv/bin/python loadtest/record.py

Lines that are not figures pass through, so that the benchmark's own words stay visible.
"""

from __future__ import annotations

import json
import sys

import report
from figures import RESULTS

REQUIRED = ("metric", "value", "unit", "command", "machine", "versions", "commit", "date")


def parse(line: str) -> dict[str, object] | None:
    """The figure in a line, or None if the line is something else.

    Raises:
        ValueError: it is a figure that lacks a required key.
    """
    if not line.startswith('{"metric"'):
        return None
    figure = json.loads(line)
    missing = [key for key in REQUIRED if figure.get(key) is None]
    if missing:
        raise ValueError(f"figure {figure.get('metric')} lacks {', '.join(missing)}: {line.strip()}")
    return figure


def main() -> int:
    figures = {}
    for line in sys.stdin:
        print(line, end="", flush=True)
        if figure := parse(line):
            figures[figure["metric"]] = json.dumps(
                {name: given for name, given in figure.items() if given is not None}, separators=(",", ":")
            )
    if figures:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        lines = [line for line in kept if json.loads(line)["metric"] not in figures]
        RESULTS.write_text("".join(f"{line}\n" for line in [*lines, *figures.values()]))
        report.update()
    print(f"{len(figures)} figures are in {RESULTS.name}", file=sys.stderr)
    return 0 if figures else 1


if __name__ == "__main__":
    raise SystemExit(main())
