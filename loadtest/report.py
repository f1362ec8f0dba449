"""Writes the figures into the documents: the newest of every metric into docs/figures.md, and into README.md
the pairs of peers.json that were taken side by side with the newest peer. record.py
does it too, after it has kept new ones.

    python loadtest/report.py [--check]     (--check writes nothing; 1 says that a table would change)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from figures import RESULTS, ROOT

BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
PEERS = RESULTS.with_name("peers.json")


def newest() -> dict[str, dict[str, Any]]:
    """The last line of each metric."""
    figures = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {figure["metric"]: figure for figure in figures}


def table(figures: Iterable[dict[str, Any]]) -> str:
    """Markdown tables of the figures, one for each run, in the order of the runs' first figures."""
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for figure in figures:
        runs.setdefault(tuple(figure[key] for key in ("command", "machine", "commit", "date")), []).append(figure)
    lines = []
    for (command, *taken), run in runs.items():
        lines += ["", f"`{command}`", f"({', '.join(taken)})", "", "| metric | value | ceiling |", "|---|---|---|"]
        for figure in run:
            ceiling = rounded(figure["ceiling"]) if figure.get("ceiling") is not None else ""
            lines.append(f"| `{figure['metric']}` | {rounded(figure['value'])} {figure['unit']} | {ceiling} |")
    return "\n".join(lines) + "\n"


def comparison(peers: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table of pairs that were taken side by side: Tessera's rate, vLLM's, and the first over the second."""
    kinds = {"bf16": "bf16", "fp8": "FP8"}
    heads = [head for name in kinds.values() for head in (f"Tessera {name}", f"vLLM {name}", "ratio")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for peer in peers.values():
        cells = [peer["title"]]
        for kind in kinds:
            pair = peer.get(kind)
            cells += [*(rate(each, peer["unit"]) for each in pair), f"{pair[0] / pair[1]:.2f}"] if pair else [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rate(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def rounded(value: float) -> str:
    """Five digits are more than any of these is good for."""
    return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"


def write(file: Path, rows: str, check: bool) -> bool:
    """Replaces the table in a file, unless it is only to be checked; whether that changes it."""
    text = file.read_text()
    written = BLOCK.sub(lambda match: match[1] + rows + match[2], text)
    if not check:
        file.write_text(written)
    return written != text


def update(check: bool = False) -> bool:
    """Writes all tables; whether any of them changes."""
    figures, peers = newest(), json.loads(PEERS.read_text())["workloads"]
    changed = [
        write(ROOT / "README.md", comparison(peers), check),
        write(ROOT / "docs" / "figures.md", table(figures[name] for name in sorted(figures)), check),
    ]
    return any(changed)


if __name__ == "__main__":
    raise SystemExit(int(update(check="--check" in sys.argv) and "--check" in sys.argv))
