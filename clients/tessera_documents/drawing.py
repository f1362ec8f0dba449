"""The picture of a page with what was found on it: each block's box, its type, and its place in the reading order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

LONGEST_SIDE = 1600  # pixels: enough to read by
COLORS = {
    "text": "#1f6feb",
    "title": "#cf222e",
    "table": "#1a7f37",
    "equation": "#9a6700",
    "image": "#8250df",
    "chart": "#8250df",
    "caption": "#bf3989",
    "footnote": "#bf3989",
}
"""By the last word of a block's type that is here."""
OTHER = "#57606a"


def drawn(page: Image.Image, blocks: Sequence[Mapping[str, Any]]) -> Image.Image:
    """A smaller copy of the page (RGB) with its blocks; their boxes are fractions of its width and height."""
    picture = page.copy()
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    draw = ImageDraw.Draw(picture)
    size = max(10, picture.height // 70)
    font = ImageFont.load_default(size)
    for number, block in enumerate(blocks, 1):
        left, top, right, bottom = (
            fraction * side for fraction, side in zip(block["bbox"], (picture.width, picture.height) * 2)
        )
        color = next((COLORS[word] for word in reversed(block["type"].split("_")) if word in COLORS), OTHER)
        draw.rectangle((left, top, right, bottom), outline=color, width=2)
        label = f"{number} {block['type']}"
        at = (left, max(0, top - size - 2))
        draw.rectangle(draw.textbbox(at, label, font), fill=color)
        draw.text(at, label, "white", font)
    return picture
