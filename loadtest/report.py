"""Writes the newest figure of every metric into docs/figures.md, and some of them into the README: `make report`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT

BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
# What a user asks first; everything else is in docs/figures.md.
HEADLINES = (
    "serve.W1.bf16.req_s",
    "serve.W3.bf16.req_s",
    "serve.W4a.bf16.tok_s",
    "serve.W4a.bf16.ttft_p50_ms",
    "serve.W1.bf16.2gpus.req_s",
    "recall.macro",
    "engine.prefill.tokens_per_s",
    "engine.decode.b10.ms",
    "vision.tiles32.ms",
    "preprocess.opencv_over_pillow",
    "preprocess.stage.images_per_s",
    "cpu.ratio_distinct",
    "cpu.ratio_4_questions",
    "soak.unanswered",
)


def newest() -> dict[str, dict[str, Any]]:
    """The last line of each metric."""
    figures: dict[str, dict[str, Any]] = {}
    for line in RESULTS.read_text().splitlines():
        figure = json.loads(line)
        figures[figure["metric"]] = figure
    return figures


def table(figures: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of the figures."""
    lines = ["| metric | value | ceiling | machine | command | commit, date |", "|---|---|---|---|---|---|"]
    for figure in figures:
        cells = (
            f"`{figure['metric']}`",
            f"{rounded(figure['value'])} {figure['unit']}",
            "" if figure["ceiling"] is None else rounded(figure["ceiling"]),
            figure["machine"],
            f"`{figure['command']}`",
            f"{figure['commit']}, {figure['date']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rounded(value: float) -> str:
    """Five digits are more than any of these is good for."""
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def main() -> int:
    figures = newest()
    tables = {
        ROOT / "README.md": table(figures[name] for name in HEADLINES if name in figures),
        ROOT / "docs" / "figures.md": table(figures[name] for name in sorted(figures)),
    }
    return max(write(file, rows) for file, rows in tables.items())


def write(file: Path, rows: str) -> int:
    """Replaces the table in a file; with --check nothing is written and 1 says that it would change."""
    text = file.read_text()
    written = BLOCK.sub(lambda match: match[1] + rows + match[2], text)
    if "--check" in sys.argv:
        return int(written != text)
    file.write_text(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
