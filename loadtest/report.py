"""Writes the figures into the documents: the newest of every metric into docs/figures.md and beside the statements of
docs/seeds.md, the pairs with other engines into README.md and docs/peers.md, and what drafts gain into docs/drafts.md.
record.py does it too, after it has kept new ones.

    python loadtest/report.py [--check]     (--check writes nothing; 1 says that a table would change)
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import seeds
from bench import drafts_report, peers_report
from figures import RESULTS, ROOT, read, rounded

BLOCK = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


def table(figures: Iterable[dict[str, Any]]) -> str:
    """Markdown lists of the figures, one for each run, in the order of the runs' first figures; those whose names
    begin alike up to the last dot stand in one line."""
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for figure in figures:
        runs.setdefault(tuple(figure[key] for key in ("command", "machine", "commit", "date")), []).append(figure)
    lines = []
    for (command, *taken), run in runs.items():
        lines += ["", f"`{command}`", f"({', '.join(taken)})", ""]
        alike: dict[str, list[str]] = {}
        for figure in run:
            stem, _, name = figure["metric"].rpartition(".")
            ceiling = f" ({rounded(figure['ceiling'])})" if figure.get("ceiling") is not None else ""
            alike.setdefault(stem, []).append(f"{name} {rounded(figure['value'])} {figure['unit']}{ceiling}")
        lines += [f"- `{stem}`: {', '.join(each)}" for stem, each in alike.items()]
    return "\n".join(lines) + "\n"


def write(file: Path, rows: str, check: bool) -> bool:
    """Replaces the table in a file, unless it is only to be checked; whether that changes it."""
    text = file.read_text()
    written = BLOCK.sub(lambda match: match[1] + rows + match[2], text)
    if not check:
        file.write_text(written)
    return written != text


def update(check: bool = False) -> bool:
    """Writes all tables; whether any of them changes."""
    figures, peers = read(), peers_report.read()
    pages = {
        "README.md": peers_report.comparison(peers),
        "docs/drafts.md": seeds.tables(figures, drafts_report.GOALS),
        "docs/figures.md": table(figures[name] for name in sorted(figures)),
        "docs/peers.md": peers_report.page(peers),
        "docs/seeds.md": seeds.tables(figures | seeds.rungs(RESULTS.with_name("ladder.jsonl"))),
    }
    return any([write(ROOT / page, rows, check) for page, rows in pages.items()])


if __name__ == "__main__":
    raise SystemExit(int(update(check="--check" in sys.argv) and "--check" in sys.argv))
