"""Writes the newest figure of every metric into the README's table: `make report`."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from figures import RESULTS, ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


def newest() -> dict[str, dict[str, Any]]:
    """The last line of each metric, in the order in which metrics first appeared."""
    figures: dict[str, dict[str, Any]] = {}
    for line in RESULTS.read_text().splitlines():
        figure = json.loads(line)
        figures[figure["metric"]] = figure
    return figures


def table(figures: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of the figures."""
    lines = ["| metric | value | ceiling | machine | command | date |", "|---|---|---|---|---|---|"]
    for name, figure in figures.items():
        ceiling = "" if figure["ceiling"] is None else f"{figure['ceiling']}"
        cells = (
            f"`{name}`",
            f"{figure['value']} {figure['unit']}",
            ceiling,
            figure["machine"],
            f"`{figure['command']}`",
            figure["date"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = README.read_text()
    written = BLOCK.sub(lambda match: match[1] + table(newest()) + match[2], text)
    if "--check" in sys.argv:
        return 0 if written == text else 1
    README.write_text(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
