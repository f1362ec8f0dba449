"""What a server does as one thing changes, as two charts beside each other (an SVG picture): how much it does, and how
long its answers take. All axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tessera_evaluation.charts import Chart

SIZE = (1120, 440)
BOXES = ((70, 470, 60, 380), (560, 960, 60, 380))
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#f28e2b")

Point = tuple[float, float, str]
"""x, y, and what is written beside it."""


def picture(
    title: str, left: tuple[str, str, Sequence[Point]], right: tuple[str, str, Mapping[str, Sequence[Point]]]
) -> str:
    """The SVG of one curve and of several; each chart with the names of its axes. All values are above 0."""
    chart = _chart(BOXES[0], *left[:2], {left[1]: left[2]})
    chart.text(20, 24, title, size="14")
    chart.parts += (beside := _chart(BOXES[1], *right)).parts
    for number, name in enumerate(right[2]):
        chart.text(beside.box[1] + 16, beside.box[2] + 12 + 18 * number, name, fill=COLOURS[number])
    return chart.svg()


def _chart(box: tuple[int, int, int, int], x_name: str, y_name: str, curves: Mapping[str, Sequence[Point]]) -> Chart:
    axes = [_round([point[axis] for curve in curves.values() for point in curve]) for axis in (0, 1)]
    (x0, *_, x1), (y0, *_, y1) = axes
    chart = Chart(SIZE, box, (math.log(x0), math.log(x1)), (math.log(y0), math.log(y1)))
    across, up = ({math.log(value): f"{value:g}" for value in axis} for axis in axes)
    chart.axes(across, up, x_name)
    chart.text(box[0] - 40, box[2] - 12, y_name)
    for colour, curve in zip(COLOURS, curves.values()):
        places = [(math.log(x), math.log(y)) for x, y, _ in curve]
        chart.curve(places, colour, 1.5)
        for (x, y), (*_, note) in zip(places, curve):
            chart.text(chart.x(x) + 4, chart.y(y) - 5, note, size="9")
    return chart


def _round(values: Sequence[float]) -> list[float]:
    """The round values that are written at a logarithmic axis, from below the least to above the greatest."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(place for place, tick in enumerate(ticks) if tick <= low)
    last = min(place for place, tick in enumerate(ticks) if tick >= high and place > first)
    return ticks[first : last + 1]
