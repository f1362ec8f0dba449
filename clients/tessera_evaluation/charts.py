"""A chart as an SVG picture, without a library: a box with two axes, and what is drawn in it and beside it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

GRID = 'stroke="#ddd"'


@dataclass
class Chart:
    """Values are placed by :meth:`x` and :meth:`y`; the other methods take places, in pixels from the upper left.

    size: width and height of the picture. box: left, right, top and bottom of what the axes enclose. across, up: the
    values at the ends of both axes.
    """

    size: tuple[int, int]
    box: tuple[int, int, int, int]
    across: tuple[float, float]
    up: tuple[float, float]
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        left, right, *_ = self.box
        low, high = self.across
        return round(left + (right - left) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        *_, top, bottom = self.box
        low, high = self.up
        return round(bottom - (bottom - top) * (value - low) / (high - low), 1)

    def axes(self, across: Mapping[float, str], up: Mapping[float, str], title: str) -> None:
        """A line of the grid at each value, and its label; ``title``: of what goes across."""
        left, right, top, bottom = self.box
        for value, label in across.items():
            self.line(self.x(value), top, self.x(value), bottom)
            self.text(self.x(value), bottom + 18, label, "middle")
        for value, label in up.items():
            self.line(left, self.y(value), right, self.y(value))
            self.text(left - 8, self.y(value) + 4, label, "end")
        self.text((left + right) / 2, bottom + 42, title, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "", fill: str = "", **font: str) -> None:
        style = f' text-anchor="{anchor}"' * bool(anchor) + f' fill="{fill}"' * bool(fill)
        style += "".join(f' font-{name}="{value}"' for name, value in font.items())
        self.parts.append(f'<text x="{x}" y="{y}"{style}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = GRID) -> None:
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>')

    def curve(self, values: Iterable[tuple[float, float]], colour: str, width: float) -> None:
        points = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in values)
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, fill: str, stroke: str) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="9" fill="{fill}" stroke="{stroke}"/>')

    def svg(self) -> str:
        width, height = self.size
        box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
        paper = f'<rect width="{width}" height="{height}" fill="white"/>'
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', paper, *self.parts, "</svg>", ""])


def ticks(low: float, high: float) -> dict[float, str]:
    """About five round numbers between low and high, with their labels."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return {step * n: f"{step * n:g}" for n in range(math.ceil(low / step), math.floor(high / step) + 1)}
