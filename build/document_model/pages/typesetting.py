"""Fonts, and lines of words on a sheet.

The fonts in ``fonts/`` are freely licensed (fonts/LICENCES.md), each cut to the characters that pages have.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pages.page import Block, Box

FONTS = Path(__file__).parent / "fonts"
FAMILIES = (
    ("Tinos-Regular.ttf", "Tinos-Bold.ttf"),
    ("Tinos-Regular.ttf", "Tinos-Bold.ttf"),
    ("Arimo-Regular.ttf", "Arimo-Bold.ttf"),
    ("Arimo-Regular.ttf", "Arimo-Bold.ttf"),
    ("Caladea-Regular.ttf", "Caladea-Bold.ttf"),
    ("OpenSans-Regular.ttf", "OpenSans-Bold.ttf"),
    ("Roboto-Regular.ttf", "Roboto-Bold.ttf"),
    ("RobotoSlab-Regular.otf", "Roboto-Bold.ttf"),
    ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
    ("DejaVuSerif.ttf", "DejaVuSans-Bold.ttf"),
    ("Cousine-Regular.ttf", "Arimo-Bold.ttf"),
)
"""(body, headings); those most met in documents stand twice."""
ITALIC = "Tinos-Italic.ttf"


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """``size`` in pixels an em."""
    return ImageFont.truetype(str(FONTS / name), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def advance(name: str, size: int, character: str) -> float:
    return font(name, size).getlength(character)


def length(name: str, size: int, text: str) -> float:
    """Pixels from where ``text`` starts to where the next would."""
    return sum(advance(name, size, character) for character in text)


@dataclass
class Sheet:
    """An empty page that is being written on; ink is darker than the paper's 255."""

    width: int
    height: int
    image: Image.Image = field(init=False)
    draw: ImageDraw.ImageDraw = field(init=False)

    def __post_init__(self) -> None:
        self.image = Image.new("L", (self.width, self.height), 255)
        self.draw = ImageDraw.Draw(self.image)


@dataclass
class Ink:
    """What a block's making gathers: glyphs with their middles, and the answer."""

    glyphs: list[str] = field(default_factory=list)
    places: list[tuple[float, float]] = field(default_factory=list)
    answer: str = ""

    def word(self, sheet: Sheet, x: float, baseline: float, text: str, name: str, size: int, grey: int = 0) -> float:
        """Writes ``text`` and says where it ends."""
        sheet.draw.text((round(x), round(baseline)), text, fill=grey, font=font(name, size), anchor="ls")
        middle = baseline - 0.3 * size
        for character in text:
            width = advance(name, size, character)
            if character != " ":
                self.glyphs.append(character)
                self.places.append((x + width / 2, middle))
            x += width
        return x

    def block(self, kind: str, box: Box) -> Block:
        """The block; its ``box`` is where all of its ink is, for now."""
        places = np.array(self.places, np.float32).reshape(-1, 2)
        return Block(kind, box, self.answer, "".join(self.glyphs), places)


@dataclass(frozen=True)
class Style:
    """How lines are set: font, pixels an em, pixels between baselines, alignment, grey level of the ink."""

    name: str
    size: int
    leading: float
    align: str = "left"
    grey: int = 0


def broken(words: list[str], style: Style, width: float, indent: float = 0.0) -> list[list[str]]:
    """Words by line; a word wider than a line stands alone."""
    space = advance(style.name, style.size, " ")
    lines: list[list[str]] = [[]]
    room = width - indent
    for word in words:
        need = length(style.name, style.size, word) + (space if lines[-1] else 0)
        if lines[-1] and need > room:
            lines.append([])
            room, need = width, need - space
        lines[-1].append(word)
        room -= need
    return lines


def set_text(
    sheet: Sheet, ink: Ink, text: str, box: tuple[float, float, float], style: Style, indent: float = 0.0
) -> float:
    """Writes ``text``, the answer, from ``box`` (left, top, width) down and returns the bottom of its last line."""
    left, top, width = box
    space = advance(style.name, style.size, " ")
    ascent = 0.78 * style.size
    lines = broken(text.split(" "), style, width, indent)
    for row, words in enumerate(lines):
        start = left + (indent if row == 0 else 0)
        used = sum(length(style.name, style.size, word) for word in words)
        slack = left + width - start - used - space * (len(words) - 1)
        gap = space
        if style.align == "centre":
            start += slack / 2
        elif style.align == "right":
            start += slack
        elif style.align == "justified" and len(words) > 1 and row + 1 < len(lines):
            gap += slack / (len(words) - 1)
        baseline = top + row * style.leading + ascent
        for word in words:
            start = ink.word(sheet, start, baseline, word, style.name, style.size, style.grey) + gap
    ink.answer = text
    return top + (len(lines) - 1) * style.leading + ascent + 0.24 * style.size
