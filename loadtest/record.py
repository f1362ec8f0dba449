"""Puts the figures in a benchmark's output into results/metrics.jsonl, each in place of the one of that name before it
(git keeps those), and writes the documents' tables again.

    make bench NAME=recall | .venv/bin/python loadtest/record.py

Lines that are not figures pass through, so that the benchmark's own words stay visible.
"""

import json
import sys
from typing import Any

import report
from figures import RESULTS, RUN, read, write

REQUIRED = ("metric", "value", "unit", *RUN)


def parse(line: str) -> dict[str, Any] | None:
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
    figures: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        print(line, end="", flush=True)
        if figure := parse(line):
            figures[figure["metric"]] = figure
    if figures:
        kept = read(RESULTS) if RESULTS.exists() else {}
        write([*(figure for name, figure in kept.items() if name not in figures), *figures.values()], RESULTS)
        report.update()
    print(f"{len(figures)} figures are in {RESULTS.name}", file=sys.stderr)
    return 0 if figures else 1


if __name__ == "__main__":
    raise SystemExit(main())
