"""Writes the figures into the documents: the newest of every metric into docs/figures.md, those of bench_joules.py into
docs/joules.md, and into README.md how the server compares with the newest peer on the standard workloads. record.py
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


def comparison(figures: Mapping[str, dict[str, Any]], peers: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table of the standard workloads: ours and the peer's in bf16, who is ahead there, and both in FP8."""
    lines = [
        "| | Tessera bf16 | vLLM 0.33 bf16 | ahead in bf16 | Tessera FP8 | vLLM 0.33 FP8 |",
        "|---|---|---|---|---|---|",
    ]
    for name, peer in peers.items():
        unit, cells = peer["unit"], [peer["title"]]
        run = f"{peer.get('figures', 'serve')}.{name}"
        runs = {"bf16": run if run.startswith("docs.") else f"{run}.bf16", "fp8": f"{run}.fp8"}
        for kind in runs:
            theirs = rate_cell(peer[kind], unit, peer.get("ttft_ms", {}).get(kind)) if kind in peer else "not measured"
            cells += [own_cell(figures, runs[kind], unit) or "not measured yet", theirs]
            if kind == "bf16":
                cells.append(who_is_ahead(own_rate(figures, runs[kind], unit), peer))
        if int4 := own_cell(figures, f"{run}.w4a16", unit):
            cells[4] += f"; with 4-bit weights {int4}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def joules(figures: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table of where the joules go: each part with its share of its whole, bf16 and FP8."""
    found = {name: figure for name, figure in figures.items() if name.startswith("joules.")}
    if not found:
        return "Not measured yet.\n"
    lines = ["| part | joules | of the whole | us x calls | W | MHz | commit |", "|---|---|---|---|---|---|---|"]
    for name, figure in found.items():
        whole = next((found[each] for each in _wholes(name) if each in found), None)
        alike = whole and whole["unit"] == figure["unit"]
        cells = [
            name.removeprefix("joules."),
            f"{rounded(figure['value'])} {figure['unit']}",
            f"{figure['value'] / whole['value']:.1%}" if whole and alike else "",
            f"{figure['us_a_call']:,} x {figure['calls']}" if "calls" in figure else "",
            *(f"{figure[key]:.0f}" if key in figure else "" for key in ("watts", "mhz")),
            str(figure["commit"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _wholes(name: str) -> tuple[str, str]:
    """What the whole of a part may be called."""
    group = name.rpartition(".")[0]
    return f"{group}.whole", f"{group}.whole_{'W2' if name.endswith('_W2') else 'W1'}"


def own_rate(figures: Mapping[str, dict[str, Any]], run: str, unit: str) -> float | None:
    """Our rate in a run's figures, None where there is none."""
    rate = figures.get(f"{run}.{'tok_s' if unit == 'tok/s' else 'req_s'}")
    return rate and rate["value"]


def own_cell(figures: Mapping[str, dict[str, Any]], run: str, unit: str) -> str | None:
    """As :func:`own_rate`, for the table."""
    rate, first = own_rate(figures, run, unit), figures.get(f"{run}.ttft_p50_ms")
    return rate and rate_cell(rate, unit, first and first["value"])


def who_is_ahead(own: float | None, peer: Mapping[str, Any]) -> str:
    """By the pairs that were taken side by side, or, where there is none, by figures of different days and machines."""
    if pairs := peer.get("side_by_side"):
        return ahead([ours / theirs for ours, theirs in pairs])
    return "not measured yet" if own is None else f"{ahead([own / peer['bf16']])} (on different days and machines)"


def rate_cell(rate: float, unit: str, first_token_ms: float | None) -> str:
    """A rate, and when the first token came where answers are streamed."""
    text = f"{rate:,.0f} {unit}" if rate >= 1000 else f"{rate:.4g} {unit}"
    return text if first_token_ms is None else f"{text}, first token {first_token_ms:.0f} ms"


def ahead(ratios: list[float]) -> str:
    """Who is ahead, by our rate over the peer's, each pair from one machine in one hour."""
    told = " and ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    if min(ratios) > 1:
        return f"Tessera: {told} times vLLM"
    return f"vLLM: Tessera has {told} of it" if max(ratios) < 1 else f"neither: {told}"


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
        write(ROOT / "README.md", comparison(figures, peers), check),
        write(ROOT / "docs" / "figures.md", table(figures[name] for name in sorted(figures)), check),
        write(ROOT / "docs" / "joules.md", joules(figures), check),
    ]
    return any(changed)


if __name__ == "__main__":
    raise SystemExit(int(update(check="--check" in sys.argv) and "--check" in sys.argv))
