"""The letters that a PDF has for a page, and what a block's reader is likely to write of them: the block's draft.

A draft need not be right: the model verifies it. So what letters are words, lines and cells is told by rule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pypdfium2
from pypdfium2 import raw

from tessera_documents.edges import NOT_READ

MOST_LETTERS = 50_000  # of a page; reading one takes 2 us
MOST_CHARACTERS = 16_384  # of a draft
NO_DRAFT = ("equation", *NOT_READ)
"""Kinds of blocks of which nothing is drafted: LaTeX has little in common with the letters of a formula."""
BY_LINES = ("code", "algorithm")
SOFT_HYPHEN = "\u00ad"
HYPHENS = f"-\u2010{SOFT_HYPHEN}"
LETTERS = dict(zip("ﬀﬁﬂﬃﬄﬅﬆ", ("ff", "fi", "fl", "ffi", "ffl", "st", "st")))
LETTERS |= {"\x02": "-", "\ufffe": "-"}  # which PDFium writes for a hyphen that ends a line
# Parts of a letter's height.
SPACE, CELL = 0.15, 0.6  # between letters that are more apart is a space, or the end of a cell
OFF_LINE = 0.5
_UNITS = 1_000_000


@dataclass
class Piece:
    """Letters of one line without a wide gap; ``left``, ``right``, ``middle`` and ``height`` in points, from the top
    left."""

    text: str
    left: float
    right: float
    middle: float
    height: float

    def beside(self, middle: float, height: float) -> bool:
        """Whether what has this middle and height is on its line."""
        return abs(middle - self.middle) < OFF_LINE * max(height, self.height)


class TextLayer:
    """``letters`` in the PDF's order, a white one between words; ``boxes`` float [n, 4]: left, top, right and bottom of
    each in points from the page's top left, as high as their font; ``size``: the page's width and height in points."""

    def __init__(self, letters: Sequence[str], boxes: np.ndarray, size: tuple[float, float]) -> None:
        self._letters, self._boxes, self._size = letters, boxes, size
        self._middles = (boxes[:, :2] + boxes[:, 2:]) / 2

    @classmethod
    def of(cls, sheet: pypdfium2.PdfPage) -> TextLayer | None:
        """A page's, None where it has no letters (a scan) or too many."""
        page = sheet.get_textpage()
        try:
            count = page.count_chars()
            if not 0 < count <= MOST_LETTERS:
                return None
            codes = [raw.FPDFText_GetUnicode(page, index) for index in range(count)]
            rect = raw.FS_RECTF()
            corners = np.zeros((count, 2, 2))
            for index in range(count):
                if raw.FPDFText_GetLooseCharBox(page, index, rect):
                    corners[index] = (rect.left, rect.top), (rect.right, rect.bottom)
        finally:
            page.close()
        size = sheet.get_size()
        placed = _placed(sheet, corners) * size
        return cls([*map(_letter, codes)], np.concatenate([placed.min(1), placed.max(1)], 1), size)

    def draft(self, kind: str, bbox: Sequence[float], angle: int | None = None) -> str | None:
        """Of a block of MinerU's kinds and angles, ``bbox`` in fractions of the page; None where there is none."""
        if kind in NO_DRAFT or angle:
            return None
        lines = self._lines(bbox)
        if kind == "table":
            text = _otsl(lines)
        else:
            texts = [_joined([piece.text for piece in line], "") for line in lines]
            text = "\n".join(texts) if kind in BY_LINES else _joined(texts, HYPHENS)
        return text.replace(SOFT_HYPHEN, "")[:MOST_CHARACTERS] or None

    def _lines(self, bbox: Sequence[float]) -> list[list[Piece]]:
        """What is in a box, from its top to its bottom and from left to right."""
        lines: list[list[Piece]] = []
        for piece in sorted(self._pieces(bbox), key=lambda piece: piece.middle):
            if lines and lines[-1][0].beside(piece.middle, piece.height):
                lines[-1].append(piece)
            else:
                lines.append([piece])
        for line in lines:
            line.sort(key=lambda piece: piece.left)
        return lines

    def _pieces(self, bbox: Sequence[float]) -> Iterator[Piece]:
        scale = np.array(self._size)
        inside = ((self._middles >= scale * bbox[:2]) & (self._middles <= scale * bbox[2:])).all(1)
        piece, spaced = None, False
        for index in np.flatnonzero(inside):
            letter = self._letters[index]
            if letter.isspace() or not letter:
                spaced = True
                continue
            left, top, right, bottom = self._boxes[index].tolist()
            middle, height = (top + bottom) / 2, bottom - top
            gap = left - piece.right if piece else 0.0
            if piece and piece.beside(middle, height) and -height < gap < CELL * height:
                piece.text += " " * (spaced or gap > SPACE * height) + letter
                piece.right = max(piece.right, right)
            else:
                if piece:
                    yield piece
                piece = Piece(letter, left, right, middle, height)
            spaced = False
        if piece:
            yield piece


def _letter(code: int) -> str:
    """What is written of a character of PDFium's; nothing of one that cannot be."""
    if 0xD800 <= code < 0xF900 or code > 0x10FFFF:  # halves of pairs, and what a font alone knows
        return ""
    letter = chr(code)
    return LETTERS.get(letter, letter if letter.isprintable() or letter in HYPHENS else " ")


def _placed(sheet: pypdfium2.PdfPage, points: np.ndarray) -> np.ndarray:
    """Points [..., 2] of a PDF's own coordinates, in fractions of the page as it is drawn, turned and cut."""

    def drawn(x: float, y: float) -> np.ndarray:
        across, down = ctypes.c_int(), ctypes.c_int()
        raw.FPDF_PageToDevice(sheet, 0, 0, _UNITS, _UNITS, 0, x, y, across, down)
        return np.array([across.value, down.value]) / _UNITS

    origin = drawn(0, 0)
    right, up = (drawn(1000, 0) - origin) / 1000, (drawn(0, 1000) - origin) / 1000
    return origin + points[..., :1] * right + points[..., 1:] * up


def _joined(texts: Sequence[str], hyphens: str) -> str:
    """Pieces of a line, or lines: one of ``hyphens`` that ends a word goes where the other part begins small."""
    text = ""
    for following in texts:
        if text and text[-1] in hyphens and text[-2:-1].isalnum():
            text = text[:-1] if text[-2].isalpha() and following[0].islower() else text
        elif text and not (_is_wide(text[-1]) or _is_wide(following[0])):
            text += " "
        text += following
    return text


def _is_wide(letter: str) -> bool:
    """Of those that are written without spaces between words: Chinese and Japanese."""
    return "\u2e80" <= letter < "\ua000" or "\uf900" <= letter < "\ufb00" or "\uff00" <= letter < "\uffef"


def _otsl(lines: Sequence[Sequence[Piece]]) -> str:
    """Lines of a table as rows of cells, in the marks that readers of tables write; of the line with the most cells
    each has a column."""
    columns = [[piece.left, piece.right] for piece in max(lines, key=len, default=[])]

    def under(piece: Piece) -> list[int]:
        found = [at for at, (left, right) in enumerate(columns) if piece.left < right and left < piece.right]
        return found or [min(range(len(columns)), key=lambda at: abs(sum(columns[at]) - piece.left - piece.right))]

    for line in lines:
        for piece in line:
            if len(found := under(piece)) == 1:
                column = columns[found[0]]
                column[:] = min(column[0], piece.left), max(column[1], piece.right)
    rows = []
    for line in lines:
        row = ["<ecel>"] * len(columns)
        for piece in line:
            first, *others = under(piece)
            row[first] = f"<fcel>{piece.text}" if row[first] == "<ecel>" else f"{row[first]} {piece.text}"
            for other in others:
                row[other] = "<lcel>"
        rows.append("".join(row) + "<nl>")
    return "".join(rows)
