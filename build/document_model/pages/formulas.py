"""Displayed formulas of a simple kind, placed here and said in LaTeX."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pages.typesetting import ITALIC, Ink, Sheet, length

UPRIGHT = "Tinos-Regular.ttf"
GREEK = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "theta": "θ",
    "lambda": "λ",
    "mu": "μ",
    "pi": "π",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "phi": "φ",
    "omega": "ω",
    "Delta": "Δ",
    "Omega": "Ω",
}
RELATIONS = {"=": "=", ">": ">", r"\leq": "≤", r"\geq": "≥", r"\neq": "≠", r"\approx": "≈"}
OPERATORS = {"+": "+", "-": "−", r"\cdot": "·", r"\times": "×", r"\pm": "±"}
FUNCTIONS = ("sin", "cos", "log", "exp", "min", "max")


@dataclass
class Piece:
    """A part of a formula: LaTeX, marks (x, y, text, font, size), rules (x0, y0, x1, y1); y grows downwards from the
    baseline, in pixels."""

    latex: str
    marks: list[tuple[float, float, str, str, int]]
    rules: list[tuple[float, float, float, float]]
    width: float
    ascent: float
    descent: float

    def moved(self, x: float, y: float) -> Piece:
        marks = [(a + x, b + y, *rest) for a, b, *rest in self.marks]
        rules = [(a + x, b + y, c + x, d + y) for a, b, c, d in self.rules]
        return Piece(self.latex, marks, rules, self.width, self.ascent - y, self.descent + y)


def mark(latex: str, text: str, name: str, size: int) -> Piece:
    wide = length(name, size, text)
    return Piece(latex, [(0.0, 0.0, text, name, size)], [], wide, 0.7 * size, 0.22 * size)


def row(pieces: list[Piece], gap: float, latex: str | None = None) -> Piece:
    """Side by side on one baseline."""
    x, parts = 0.0, []
    for piece in pieces:
        parts.append((piece, x, 0.0))
        x += piece.width + gap
    return over(parts, " ".join(piece.latex for piece in pieces) if latex is None else latex, x - gap)


def over(parts: list[tuple[Piece, float, float]], latex: str, width: float) -> Piece:
    """Parts at given places, in one piece of ``width``."""
    moved = [piece.moved(x, y) for piece, x, y in parts]
    marks = [each for piece in moved for each in piece.marks]
    rules = [each for piece in moved for each in piece.rules]
    return Piece(latex, marks, rules, width, max(p.ascent for p in moved), max(p.descent for p in moved))


def variable(dice: Random, size: int) -> Piece:
    if dice.random() < 0.3:
        name, sign = dice.choice(sorted(GREEK.items()))
        return mark(f"\\{name}", sign, ITALIC if sign.islower() else UPRIGHT, size)
    letter = dice.choice("abcdefghijkmnpqrstuvwxyzABCDEFGHKLMNPQRSTVWXYZ")
    return mark(letter, letter, ITALIC, size)


def constant(dice: Random, size: int) -> Piece:
    text = str(dice.choice((dice.randint(0, 9), dice.randint(10, 999), dice.randint(1, 99) / 10)))
    return mark(text, text, UPRIGHT, size)


def scripted(dice: Random, size: int) -> Piece:
    base, small = variable(dice, size), max(9, round(0.68 * size))
    script = dice.choice((variable, constant))(dice, small)
    raised = dice.random() < 0.5
    place = -0.42 * size if raised else 0.2 * size
    latex = f"{base.latex}{'^' if raised else '_'}{{{script.latex}}}"
    return over([(base, 0, 0), (script, base.width + 0.05 * size, place)], latex, base.width + script.width)


def fraction(dice: Random, size: int, depth: int) -> Piece:
    inner = round(0.9 * size)
    top, bottom = (total(dice, inner, depth + 1, dice.randint(1, 2)) for _ in range(2))
    wide = max(top.width, bottom.width) + 0.3 * size
    axis = -0.28 * size
    bar = Piece("", [], [(0, axis, wide, axis)], wide, 0, 0)
    parts = [
        (top, (wide - top.width) / 2, axis - 0.18 * size - top.descent),
        (bottom, (wide - bottom.width) / 2, axis + 0.15 * size + bottom.ascent),
        (bar, 0, 0),
    ]
    return over(parts, f"\\frac{{{top.latex}}}{{{bottom.latex}}}", wide)


def root(dice: Random, size: int, depth: int) -> Piece:
    inner = total(dice, size, depth + 1, dice.randint(1, 2))
    lead, top, low = 0.6 * size, -inner.ascent - 0.12 * size, inner.descent
    sign = [(0, low - 0.45 * size, 0.2 * size, low), (0.2 * size, low, 0.5 * size, top)]
    rules = [*sign, (0.5 * size, top, lead + inner.width + 0.1 * size, top)]
    hook = Piece("", [], rules, 0, -top + 1, low + 1)
    return over([(hook, 0, 0), (inner, lead, 0)], f"\\sqrt{{{inner.latex}}}", lead + inner.width + 0.1 * size)


def big(dice: Random, size: int, depth: int) -> Piece:
    """A sum or an integral with bounds, and what stands behind it."""
    small = max(9, round(0.62 * size))
    name, sign = dice.choice((("\\sum", "∑"), ("\\int", "∫")))
    large = mark(name, sign, UPRIGHT, round(1.5 * size)).moved(0, 0.25 * size)
    index = variable(dice, small)
    start = constant(dice, small)
    lower = row([index, mark("=", "=", UPRIGHT, small), start], 0, f"{index.latex}={start.latex}")
    if sign == "∫":
        lower = start
    upper = dice.choice((variable(dice, small), mark("\\infty", "∞", UPRIGHT, small)))
    body = term(dice, size, depth + 1)
    wide = max(large.width, lower.width, upper.width)
    parts = [
        (large, (wide - large.width) / 2, 0),
        (lower, (wide - lower.width) / 2, large.descent + lower.ascent + 0.05 * size),
        (upper, (wide - upper.width) / 2, -large.ascent - upper.descent - 0.1 * size),
        (body, wide + 0.2 * size, 0),
    ]
    latex = f"{name}_{{{lower.latex}}}^{{{upper.latex}}} {body.latex}"
    return over(parts, latex, wide + 0.2 * size + body.width)


def function(dice: Random, size: int, depth: int) -> Piece:
    name, body = dice.choice(FUNCTIONS), total(dice, size, depth + 1, dice.randint(1, 2))
    signs = [mark(f"\\{name}", name, UPRIGHT, size), mark("(", "(", UPRIGHT, size)]
    latex = f"\\{name}({body.latex})"
    return row([*signs, body, mark(")", ")", UPRIGHT, size)], 0.06 * size, latex)


def term(dice: Random, size: int, depth: int) -> Piece:
    kind = dice.random()
    if depth < 2 and kind < 0.2:
        return fraction(dice, size, depth)
    if depth < 2 and kind < 0.28:
        return root(dice, size, depth)
    if depth < 2 and kind < 0.36:
        return function(dice, size, depth)
    if depth < 1 and kind < 0.44:
        return big(dice, size, depth)
    return dice.choice((variable, constant, scripted, scripted))(dice, size)


def total(dice: Random, size: int, depth: int, terms: int) -> Piece:
    pieces = [term(dice, size, depth)]
    for _ in range(terms - 1):
        latex, sign = dice.choice(sorted(OPERATORS.items()))
        pieces += [mark(latex, sign, UPRIGHT, size), term(dice, size, depth)]
    return row(pieces, 0.22 * size)


def random_formula(dice: Random, size: int) -> Piece:
    """A relation of two sides."""
    latex, sign = dice.choice((("=", "="), ("=", "="), dice.choice(sorted(RELATIONS.items()))))
    sides = total(dice, size, 1, 1), total(dice, size, 0, dice.randint(1, 3))
    return row([sides[0], mark(latex, sign, UPRIGHT, size), sides[1]], 0.28 * size)


def draw_formula(sheet: Sheet, ink: Ink, piece: Piece, left: float, top: float, size: int) -> float:
    """Draws ``piece`` with its top left corner there, leaves its LaTeX as ``ink.answer`` and returns its bottom."""
    placed = piece.moved(left, top + piece.ascent)
    for x, y, text, name, mark_size in placed.marks:
        ink.word(sheet, x, y, text, name, mark_size)
    for rule in placed.rules:
        sheet.draw.line(tuple(map(round, rule)), fill=0, width=max(1, round(size / 16)))
    ink.answer = piece.latex
    return top + piece.ascent + piece.descent
