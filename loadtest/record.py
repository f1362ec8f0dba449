"""Appends the figures in a benchmark's output to results/metrics.jsonl, and writes the documents' tables anew.

    make bench NAME=cpu | .venv/bin/python loadtest/record.py

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
    count = 0
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as results:
        for line in sys.stdin:
            print(line, end="", flush=True)
            figure = parse(line)
            if figure:
                results.write(json.dumps(figure) + "\n")
                count += 1
    if count:
        report.update()
    print(f"{count} figures appended to {RESULTS.name}", file=sys.stderr)
    return 0 if count else 1


if __name__ == "__main__":
    raise SystemExit(main())
