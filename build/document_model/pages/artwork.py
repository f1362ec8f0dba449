"""Figures: charts and shapes without meaning, so that a layout has pictures."""

import math
from random import Random

from pages import words
from pages.page import Box
from pages.typesetting import Sheet, font


def _levels(dice: Random, count: int) -> list[float]:
    level, found = dice.random(), []
    for _ in range(count):
        level = min(1.0, max(0.0, level + dice.uniform(-0.3, 0.3)))
        found.append(level)
    return found


def _axes(sheet: Sheet, dice: Random, box: Box) -> Box:
    left, top, right, bottom = box
    size = max(10, round((bottom - top) / 22))
    inner = (left + 2.5 * size, top + size, right - size, bottom - 2 * size)
    sheet.draw.line((inner[0], inner[1], inner[0], inner[3], inner[2], inner[3]), fill=0, width=2)
    face = font("Arimo-Regular.ttf", size)
    for step in range(5):
        y = inner[3] + (inner[1] - inner[3]) * step / 4
        sheet.draw.text((left, y), str(step * dice.choice((5, 10, 25))), fill=0, font=face, anchor="lm")
        x = inner[0] + (inner[2] - inner[0]) * step / 4
        sheet.draw.text((x, bottom), words.number(dice)[:5], fill=0, font=face, anchor="mb")
    return inner


def bars(sheet: Sheet, dice: Random, box: Box) -> None:
    left, top, right, bottom = _axes(sheet, dice, box)
    levels = _levels(dice, dice.randint(3, 12))
    step = (right - left) / len(levels)
    for index, level in enumerate(levels):
        x, y = left + index * step, bottom - level * (bottom - top)
        sheet.draw.rectangle((x + 0.15 * step, y, x + 0.85 * step, bottom), fill=dice.randint(40, 200), outline=0)


def curves(sheet: Sheet, dice: Random, box: Box) -> None:
    left, top, right, bottom = _axes(sheet, dice, box)
    for _ in range(dice.randint(1, 3)):
        levels = _levels(dice, dice.randint(5, 30))
        step = (right - left) / (len(levels) - 1)
        points = [(left + i * step, bottom - level * (bottom - top)) for i, level in enumerate(levels)]
        sheet.draw.line(points, fill=dice.randint(0, 140), width=dice.randint(1, 4))


def scatter(sheet: Sheet, dice: Random, box: Box) -> None:
    left, top, right, bottom = _axes(sheet, dice, box)
    for _ in range(dice.randint(15, 80)):
        x, y, r = dice.uniform(left, right), dice.uniform(top, bottom), dice.uniform(2, 6)
        sheet.draw.ellipse((x - r, y - r, x + r, y + r), fill=dice.randint(0, 150))


def shapes(sheet: Sheet, dice: Random, box: Box) -> None:
    """Something like a photograph: a ground of grey with things on it."""
    left, top, right, bottom = box
    sheet.draw.rectangle(box, fill=dice.randint(60, 220), outline=dice.choice((None, 0)))
    for _ in range(dice.randint(3, 12)):
        x, y = dice.uniform(left, right), dice.uniform(top, bottom)
        w, h = min(x - left, right - x), min(y - top, bottom - y)
        w, h = w * dice.uniform(0.3, 1), h * dice.uniform(0.3, 1)
        grey = dice.randint(0, 255)
        if dice.random() < 0.5:
            sheet.draw.ellipse((x - w, y - h, x + w, y + h), fill=grey)
        else:
            turns = sorted(dice.uniform(0, 2 * math.pi) for _ in range(dice.randint(3, 6)))
            sheet.draw.polygon([(x + w * math.cos(t), y + h * math.sin(t)) for t in turns], fill=grey)


def flow(sheet: Sheet, dice: Random, box: Box) -> None:
    """Boxes with words, joined by lines."""
    left, top, right, bottom = box
    count = dice.randint(2, 4)
    step, size = (right - left) / count, max(10, round((bottom - top) / 16))
    face = font("Arimo-Regular.ttf", size)
    sheet.draw.line((left + 1, (top + bottom) / 2, right - 1, (top + bottom) / 2), fill=0, width=2)
    for index in range(count):
        middle = left + (index + 0.5) * step, (top + bottom) / 2
        w, h = 0.4 * step, (bottom - top) * dice.uniform(0.2, 0.5)
        outline = (middle[0] - w, middle[1] - h, middle[0] + w, middle[1] + h)
        sheet.draw.rectangle(outline, fill=dice.randint(200, 255), outline=0, width=2)
        sheet.draw.text(middle, dice.choice(words.WORDS)[: max(2, int(w / size * 3))], fill=0, font=face, anchor="mm")


def draw_figure(sheet: Sheet, dice: Random, box: Box) -> None:
    """Fills ``box``, to its edges or nearly."""
    dice.choice((bars, curves, scatter, shapes, shapes, flow))(sheet, dice, box)
