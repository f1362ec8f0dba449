"""What a server does as one thing changes, as two charts beside each other (an SVG picture): how much it does, and how
long its answers take. All axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 1120, 440
TOP, BOTTOM = 60, 380  # of both boxes, in pixels
BOXES = ((70, 470), (560, 960))  # left and right of each
COLOURS = ("#4e79a7", "#e15759", "#59a14f", "#f28e2b")
TITLE = 14

Point = tuple[float, float, str]
"""x, y, and what is written beside it."""


def picture(
    title: str, left: tuple[str, str, Sequence[Point]], right: tuple[str, str, Mapping[str, Sequence[Point]]]
) -> str:
    """The SVG of one curve and of several; each chart with the names of its axes. All values are above 0."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(20, 24, title, size=TITLE),
    ]
    parts += _chart(BOXES[0], *left[:2], {left[1]: left[2]})
    parts += _chart(BOXES[1], *right)
    for number, name in enumerate(right[2]):
        parts.append(text(BOXES[1][1] + 16, TOP + 12 + 18 * number, name, fill=COLOURS[number]))
    return "\n".join([*parts, "</svg>", ""])


def _chart(box: tuple[int, int], x_name: str, y_name: str, curves: Mapping[str, Sequence[Point]]) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    x, x_ticks = _axis([point[0] for point in points], *box)
    y, y_ticks = _axis([point[1] for point in points], BOTTOM, TOP)
    parts = [
        text(sum(box) / 2, BOTTOM + 42, x_name, anchor="middle"),
        text(box[0] - 40, TOP - 12, y_name),
    ]
    for value in x_ticks:
        parts.append(f'<path d="M{x(value):.1f} {TOP}V{BOTTOM}" stroke="#eee"/>')
        parts.append(text(x(value), BOTTOM + 18, f"{value:g}", anchor="middle"))
    for value in y_ticks:
        parts.append(f'<path d="M{box[0]} {y(value):.1f}H{box[1]}" stroke="#eee"/>')
        parts.append(text(box[0] - 6, y(value) + 4, f"{value:g}", anchor="end"))
    for colour, curve in zip(COLOURS, curves.values()):
        corners = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up, _ in curve)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for across, up, note in curve:
            parts.append(f'<circle cx="{x(across):.1f}" cy="{y(up):.1f}" r="3" fill="{colour}"/>')
            parts.append(text(x(across) + 4, y(up) - 5, note, size=9))
    return parts


def _axis(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands between two pixels on a logarithmic scale, and the round values that are written there."""
    low, high = min(values), max(values)
    ticks = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digit in (1, 2, 5)
    ]
    first = max(tick for tick in ticks if tick <= low)
    last = min(tick for tick in ticks if tick >= high and tick > first)
    scale = (end - begin) / math.log(last / first)
    return lambda value: begin + scale * math.log(value / first), [tick for tick in ticks if first <= tick <= last]


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, fill: str = "black") -> str:
    """Words at a place in pixels."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{fill}">{escape(words)}</text>'
