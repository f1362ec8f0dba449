"""The report of a run: Markdown, an SVG plot beside it, and the same figures as JSON."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from tessera_evaluation.charts import Chart
from tessera_evaluation.recall import share_right
from tessera_quantize.run import Job, Row

COLOURS = ("#1f5fbf", "#c0392b", "#2e8b57")
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 80, 560, 50, 330, 780, 380


def write(folder: Path, job: Job, rows: Sequence[Row]) -> None:
    """Writes ``report.md``, ``errors.svg`` and ``report.json`` into ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "report.md").write_text(markdown(job, rows), encoding="utf-8")
    (folder / "errors.svg").write_text(plot(rows), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(document(job, rows), indent=1) + "\n", encoding="utf-8")


def document(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
    """All figures as plain data."""
    return {
        "checkpoint": job.source.resolve().name,
        "recipe": asdict(job.recipe),
        "vision": "fp8" if job.vision_fp8 else "as it was",
        "questions": {"calibration": len(job.calibration), "held_out": len(job.held_out)},
        "rows": [asdict(row) for row in rows],
    }


def markdown(job: Job, rows: Sequence[Row]) -> str:
    """The report as a page."""
    recipe = job.recipe
    form = "FP8, a scale a channel" if recipe.method == "fp8" else f"4 bits, groups of {recipe.group_size}"
    if recipe.method != "fp8":
        form += ", symmetric" if recipe.symmetric else ", with zeros"
    policies = list(rows[0].recall)
    head = ["weights", "MB", "error of the layers", "KL, millinats", "of answers", "same likeliest token"]
    head += [f"recall, {policy}" for policy in policies]
    lines = [
        f"# {job.source.resolve().name}: {recipe.method.upper()}",
        "",
        f"{form}; the vision tower {'in FP8' if job.vision_fp8 else 'as it was'}. Calibrated on {len(job.calibration)} "
        f"questions, judged on {len(job.held_out)} others. KL and likeliest tokens are against the original model, "
        "over the words of question and right answer; the error of a layer is the share of its outputs' squares, "
        "on what its row was calibrated on. Recall is the mean balanced accuracy over classes of yes/no questions, or "
        "the share of right answers where there are none.",
        "",
        *_table(head, [_cells(row, policies) for row in rows]),
        "",
        "![error by layer](errors.svg)",
        "",
        f"## Errors of {rows[1].name}, %",
        "",
    ]
    layers = [_without_numbers(layer) for layer in rows[1].errors]
    modules = list(dict.fromkeys(name for layer in layers for name in layer))  # some layers may have no experts
    body = [
        [str(index), *(f"{100 * layer[name]:.3f}" if name in layer else "" for name in modules)]
        for index, layer in enumerate(layers)
    ]
    return "\n".join([*lines, *_table(["layer", *modules], body), ""])


def _without_numbers(errors: Mapping[str, float]) -> dict[str, float]:
    """A layer's errors, of its experts the mean."""
    found: dict[str, list[float]] = {}
    for name, error in errors.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(error)
    return {name: mean(each) for name, each in found.items()}


def layer_errors(row: Row) -> list[float]:
    """The mean over the modules of each layer."""
    return [mean(layer.values()) for layer in row.errors]


def _cells(row: Row, policies: Sequence[str]) -> list[str]:
    error = f"{100 * mean(layer_errors(row)):.3f}%" if row.errors else "-"
    figures = [f"{row.bytes / 1e6:.2f}", error, f"{1000 * row.kl:.3f}", f"{1000 * row.answers_kl:.4f}"]
    figures.append(f"{100 * row.same:.2f}%")
    return [row.name, *figures, *(f"{100 * share_right(row.recall[policy]):.2f}%" for policy in policies)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def plot(rows: Sequence[Row]) -> str:
    """Each row's error by layer as an SVG picture, on a logarithmic scale."""
    curves = {row.name: layer_errors(row) for row in rows if row.errors}
    values = [value for curve in curves.values() for value in curve if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    last = max(len(curve) for curve in curves.values()) - 1

    chart = Chart((WIDTH, HEIGHT), (LEFT, RIGHT, TOP, BOTTOM), (0, max(last, 1)), (low, max(high, low + 1)))
    chart.text(LEFT, 24, "Error of the layers: share of their outputs' squares", size="14")
    powers = {float(power): f"{100 * 10.0**power:g}%" for power in range(low, high + 1)}
    chart.axes({float(layer): str(layer) for layer in range(0, last + 1, max(1, last // 8))}, powers, "layer")
    for number, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS)):
        chart.curve(((layer, math.log10(max(value, 10.0**low))) for layer, value in enumerate(curve)), colour, 2)
        chart.text(RIGHT + 16, TOP + 20 * number, name, fill=colour)
    return chart.svg()
