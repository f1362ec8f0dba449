"""Pages put together: header, title, one column or two of blocks, footer, page number."""

from collections.abc import Callable
from random import Random

import numpy as np

from pages import words
from pages.artwork import draw_figure
from pages.formulas import draw_formula, random_formula
from pages.page import Block, Box, Page
from pages.tables import draw_table
from pages.typesetting import FAMILIES, Ink, Sheet, Style, broken, length, set_text

PAPERS = ((8.27, 11.69), (8.5, 11.0))
DOTS_PER_INCH = (144, 216)
"""The least and the most; what turns PDFs into pictures mostly takes 200."""
PAD = 2  # pixels between ink and box
INK = 250  # grey levels below are ink


def ink_box(picture: np.ndarray, region: Box) -> Box | None:
    """The box around the ink inside of ``region``, padded; None where there is none."""
    height, width = picture.shape
    left, top, right, bottom = (round(side) for side in region)
    left, top = max(0, left), max(0, top)
    dark = picture[top:bottom, left:right] < INK
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    if not len(rows):
        return None
    return (
        float(max(0, left + columns[0] - PAD)),
        float(max(0, top + rows[0] - PAD)),
        float(min(width, left + columns[-1] + 1 + PAD)),
        float(min(height, top + rows[-1] + 1 + PAD)),
    )


class Composer:
    """One page in the making. Every ``_put_...`` takes (left, top, width), draws there and returns the bottom."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        dots = dice.uniform(*DOTS_PER_INCH)
        self.sheet = Sheet(*(round(side * dots) for side in dice.choice(PAPERS)))
        self.body, self.bold = dice.choice(FAMILIES)
        self.size = round(dice.uniform(9, 12.5) * dots / 72)
        self.leading = self.size * dice.uniform(1.12, 1.5)
        self.align = dice.choice(("left", "justified", "justified"))
        self.grey = dice.choice((0, 0, 0, 40, 70))
        self.indent = dice.choice((0.0, 0.0, 1.5)) * self.size
        self.ruled = dice.random() < 0.4
        self.blocks: list[Block] = []

    def page(self) -> Page:
        width, height, dice = self.sheet.width, self.sheet.height, self.dice
        side, top, bottom = (width * dice.uniform(0.07, 0.13), height * dice.uniform(0.07, 0.1), height * 0.92)
        if dice.random() < 0.6:
            self._put_running("header", side, height * dice.uniform(0.025, 0.045), width - 2 * side)
        if dice.random() < 0.3:
            top = self._put_title(side, top, width - 2 * side)
        columns = 2 if dice.random() < 0.45 else 1
        gap = self.size * dice.uniform(1.5, 2.5)
        wide = (width - 2 * side - gap * (columns - 1)) / columns
        for column in range(columns):
            low = top + (bottom - top) * (1 if dice.random() < 0.85 else dice.uniform(0.3, 1))
            self._fill(side + column * (wide + gap), top, wide, low)
        foot = height * dice.uniform(0.945, 0.965)
        if dice.random() < 0.35:
            self._put_running("footer", side, foot, (width - 2 * side) * 0.6)
        if dice.random() < 0.7:
            self._put_number(side, foot, width - 2 * side)
        picture = np.asarray(self.sheet.image)
        found = []
        for block in self.blocks:
            box = ink_box(picture, block.box)
            if box is not None:
                block.box = box
                found.append(block)
        return Page(picture.copy(), found)

    def _add(self, kind: str, ink: Ink, left: float, top: float, right: float, bottom: float) -> None:
        """Remembers a block with the region that all its ink is in."""
        self.blocks.append(ink.block(kind, (left - 3, top - 0.1 * self.size, right + 3, bottom + 0.1 * self.size)))

    def _put_text(
        self, kind: str, text: str, place: tuple[float, float, float], style: Style, indent: float = 0.0
    ) -> float:
        ink = Ink()
        bottom = set_text(self.sheet, ink, text, place, style, indent)
        left, top, width = place
        self._add(kind, ink, left, top, left + width, bottom)
        return bottom

    def _style(self, scale: float = 1.0, name: str | None = None, align: str = "left") -> Style:
        size = max(13, round(scale * self.size))
        return Style(name or self.body, size, self.leading * size / self.size, align, self.grey)

    def _put_running(self, kind: str, left: float, top: float, width: float) -> None:
        style = self._style(0.8)
        text = " ".join(words.word(self.dice) for _ in range(self.dice.randint(1, 5)))
        while length(style.name, style.size, text) > width and " " in text:
            text = text.rpartition(" ")[0]
        self._put_text(kind, text, (left, top, width), Style(style.name, style.size, style.leading, self._side()))

    def _side(self) -> str:
        return self.dice.choice(("left", "centre", "right"))

    def _put_number(self, left: float, top: float, width: float) -> None:
        number = str(self.dice.randint(1, 999))
        form = self.dice.choice(("{}", "{}", "– {} –", "Page {}", "{} / 999"))
        style = self._style(0.85)
        # Right of the footer, which has the left 60 % of the line.
        room = (left + 0.65 * width, top, 0.35 * width)
        side = "right" if any(block.kind == "footer" for block in self.blocks) else self._side()
        place = room if side == "right" else (left, top, width)
        self._put_text("page_number", form.format(number), place, Style(style.name, style.size, style.leading, side))

    def _put_title(self, left: float, top: float, width: float) -> float:
        style = self._style(self.dice.uniform(1.7, 2.4), self.bold, self.dice.choice(("left", "centre")))
        return self._put_text("title", words.heading(self.dice), (left, top, width), style) + self.size

    def _fill(self, left: float, top: float, width: float, low: float) -> None:
        """Blocks one below the other until one does not fit, which is wiped off again."""
        dice = self.dice
        makers: list[tuple[float, Callable[[float, float, float], float]]] = [
            (0.46, self._put_paragraph),
            (0.16, self._put_heading),
            (0.09, self._put_list),
            (0.1, self._put_table),
            (0.08, self._put_figure),
            (0.11, self._put_formula),
        ]
        while top + 1.5 * self.leading < low:
            make = dice.choices([make for _, make in makers], [share for share, _ in makers])[0]
            before = len(self.blocks)
            bottom = make(left, top, width)
            if bottom > low:
                del self.blocks[before:]
                edge = (left - 4, top - 0.2 * self.size, left + width + 4, self.sheet.height)
                self.sheet.draw.rectangle(edge, fill=255)
                return
            # More than is blank between two lines, or none could tell where a block ends.
            top = bottom + (self.leading - self.size) + self.size * dice.uniform(0.6, 1.6)

    def _put_paragraph(self, left: float, top: float, width: float) -> float:
        text = words.paragraph(self.dice, self.dice.choice((40, 150, 300, 450, 600)))
        style = self._style(self.dice.choice((1, 1, 1, 0.9)), align=self.align)
        # So that an answer stays below about 900 characters whatever the column's width.
        lines = broken(text[:900].split(" "), style, width, self.indent)
        return self._put_text(
            "text", " ".join(" ".join(line) for line in lines), (left, top, width), style, self.indent
        )

    def _put_heading(self, left: float, top: float, width: float) -> float:
        style = self._style(self.dice.uniform(1.0, 1.5), self.bold)
        return self._put_text("title", words.heading(self.dice), (left, top + 0.3 * self.size, width), style)

    def _put_list(self, left: float, top: float, width: float) -> float:
        mark = self.dice.choice(("•", "–", "*", "1.", "a)", "(1)"))
        style = self._style()
        inset = self.dice.uniform(0.0, 1.5) * self.size
        gap = self.leading - self.size + self.size * self.dice.uniform(0.4, 0.8)
        bottom = top - gap
        for index in range(self.dice.randint(2, 5)):
            sign = mark.replace("1", str(index + 1)).replace("a", "abcdefgh"[index])
            text = f"{sign} {words.sentence(self.dice, self.dice.randint(2, 14))}"
            bottom = self._put_text("list_item", text, (left + inset, bottom + gap, width - inset), style)
        return bottom

    def _caption(self, kind: str, name: str, left: float, top: float, width: float) -> float:
        text = f"{name} {self.dice.randint(1, 30)}{self.dice.choice('.:')} {words.sentence(self.dice, 6)}"
        style = self._style(0.88, align=self.dice.choice(("left", "centre")))
        return self._put_text(kind, text, (left, top, width), style)

    def _put_table(self, left: float, top: float, width: float) -> float:
        ink, above, told = Ink(), self.dice.random() < 0.5, self.dice.random() < 0.75
        if told and above:
            top = self._caption("table_caption", "Table", left, top, width) + 0.5 * self.size
        bottom = draw_table(self.sheet, ink, self.dice, left, top, width, self._style(self.dice.uniform(0.8, 1.0)))
        self._add("table", ink, left, top, left + width, bottom)
        if told and not above:
            bottom = self._caption("table_caption", "Table", left, bottom + 0.5 * self.size, width)
        return bottom

    def _put_figure(self, left: float, top: float, width: float) -> float:
        wide = width * self.dice.uniform(0.4, 1.0)
        x = left + (width - wide) / 2
        bottom = top + min(wide, width) * self.dice.uniform(0.3, 0.8)
        draw_figure(self.sheet, self.dice, (x, top, x + wide, bottom))
        self.blocks.append(Block("image", (x - 6, top - 6, x + wide + 6, bottom + 6)))
        if self.dice.random() < 0.8:
            name = self.dice.choice(("Figure", "Fig."))
            bottom = self._caption("image_caption", name, left, bottom + 0.5 * self.size, width)
        return bottom

    def _put_formula(self, left: float, top: float, width: float) -> float:
        piece = random_formula(self.dice, self.size)
        for _ in range(8):
            if piece.width < 0.9 * width:
                break
            piece = random_formula(self.dice, self.size)
        ink, x = Ink(), left + max(0.0, (width - piece.width) / 2)
        top += 0.3 * self.size
        bottom = draw_formula(self.sheet, ink, piece, x, top, self.size)
        self._add("equation", ink, x - 2, top - 0.2 * self.size, x + piece.width + 2, bottom + 0.2 * self.size)
        return bottom + 0.3 * self.size
