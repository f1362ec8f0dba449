"""Tables: drawn with rules, shades or neither; said in OTSL, the grammar of MinerU's table step."""

from random import Random

from pages import words
from pages.typesetting import Ink, Sheet, Style, length

MOST_CELLS = 48


def _content(dice: Random, numeric: bool) -> str:
    if dice.random() < 0.06:
        return ""
    if numeric:
        return words.number(dice)
    return " ".join(words.word(dice) for _ in range(dice.choice((1, 1, 2, 3))))


def random_cells(dice: Random, style: Style, width: float) -> tuple[list[list[str | None]], list[float]]:
    """Rows of cells and the widths of their columns, at least two; None continues the cell to the left."""
    for _ in range(20):
        cells, widths = _cells(dice, style)
        while sum(widths) > width and len(widths) > 2:
            for row in cells:
                row.pop()
            widths.pop()
        if sum(widths) <= width:
            break
    if sum(widths) < width and dice.random() < 0.5:
        widths = [each * width / sum(widths) for each in widths]
    return cells, widths


def _cells(dice: Random, style: Style) -> tuple[list[list[str | None]], list[float]]:
    numeric = [column > 0 and dice.random() < 0.6 for column in range(dice.randint(2, 6))]
    header: list[str | None] = [words.capital(words.word(dice)) for _ in numeric]
    if len(numeric) > 2 and dice.random() < 0.2:
        header[dice.randrange(1, len(numeric))] = None
    rows = min(dice.randint(2, 9), MOST_CELLS // len(numeric))
    cells = [header, *([_content(dice, column) for column in numeric] for _ in range(rows))]
    pad = style.size * dice.uniform(0.6, 1.4)

    def wide(column: int) -> float:
        return max(length(style.name, style.size, row[column] or "") for row in cells) + 2 * pad

    return cells, [wide(column) for column in range(len(numeric))]


def otsl(cells: list[list[str | None]]) -> str:
    def cell(text: str | None) -> str:
        return "<lcel>" if text is None else f"<fcel>{text}" if text else "<ecel>"

    return "".join("".join(map(cell, row)) + "<nl>" for row in cells)


def draw_table(sheet: Sheet, ink: Ink, dice: Random, left: float, top: float, width: float, style: Style) -> float:
    """Draws a table, leaves its OTSL as ``ink.answer`` and returns its bottom."""
    cells, widths = random_cells(dice, style, width)
    left += (width - sum(widths)) * dice.choice((0.0, 0.5))
    right, high = left + sum(widths), style.size * dice.uniform(1.5, 2.3)
    bottom = top + high * len(cells)
    look = dice.choice(("grid", "rules", "header", "bands", "plain"))
    pen, grey = dice.choice((1, 1, 2)), dice.choice((0, 0, 90, 160))
    if look == "bands":
        for row in range(0, len(cells), 2):
            sheet.draw.rectangle((left, top + row * high, right, top + (row + 1) * high), fill=dice.randint(215, 240))
    elif look in ("header", "grid") and dice.random() < 0.6:
        sheet.draw.rectangle((left, top, right, top + high), fill=dice.randint(200, 240))
    aligned = [dice.choice((0.0, 0.0, 0.5, 1.0)) for _ in widths]
    pad = style.size * 0.5
    for row, texts in enumerate(cells):
        x = left
        for column, text in enumerate(texts):
            span = widths[column]
            for follower in range(column + 1, len(texts)):
                if texts[follower] is not None:
                    break
                span += widths[follower]
            if text is not None:
                slack = span - 2 * pad - length(style.name, style.size, text)
                baseline = top + (row + 0.5) * high + 0.33 * style.size
                ink.word(sheet, x + pad + slack * aligned[column], baseline, text, style.name, style.size, style.grey)
                if look == "grid":
                    outline = (x, top + row * high, x + span, top + (row + 1) * high)
                    sheet.draw.rectangle(outline, outline=grey, width=pen)
            x += widths[column]
    levels = {"rules": range(len(cells) + 1), "header": (0, 1, len(cells))}.get(look, ())
    for row in levels:
        sheet.draw.line((left, top + row * high, right, top + row * high), fill=grey, width=pen)
    ink.answer = otsl(cells)
    return bottom + pen
