"""The blocks of a PDF's page by its own text layer: what a document model's layout step would find, by geometry alone.

Characters become segments: lines, cut at wide gaps. Segments close together and of one size become blocks, and short
ones in three or more rows of three or more a table. Pictures count where they are large enough to see and do not cover
the page, as a scan below its recognized text does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import pypdfium2
from pypdfium2 import raw

# Of a line's height
CUT = 1.0  # a wider gap is between columns or cells
LEADING = 0.4  # a wider one is between paragraphs
INDENT = 0.6
ROW_GAP = 2.0  # a wider one is between tables
TALLER = 1.25  # times; lines of one block differ by less
TITLE = 1.18  # times the page's usual line
# Of the page's width and height
CELL = 0.22  # what is wider is no cell of a table
TABLE = 3  # rows, and cells in each
MARGIN = 0.07  # where headers, footers and page numbers are
LEAST_PICTURE, MOST_PICTURE = 0.04, 0.9  # each side; the area


@dataclass(slots=True)
class Segment:
    """A line or a piece of one; in points from the page's upper left corner. ``heights``: of its characters."""

    text: str
    left: float
    top: float
    right: float
    bottom: float
    heights: list[float]

    @property
    def height(self) -> float:
        """Of most of it: bullets and small raised numbers are of another."""
        return median(self.heights)

    def add(self, other: Segment) -> None:
        self.text += other.text
        self.left, self.top = min(self.left, other.left), min(self.top, other.top)
        self.right, self.bottom = max(self.right, other.right), max(self.bottom, other.bottom)
        self.heights += other.heights


@dataclass(frozen=True, slots=True)
class Block:
    """``box``: left, top, right and bottom in thousandths of the page, as MinerU's layout answers have them.
    ``rows``: a table's rows of cells; of other blocks each line is a row of one; none for pictures."""

    kind: str
    box: tuple[int, int, int, int]
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def text(self) -> str:
        return " ".join(cell for row in self.rows for cell in row)


def blocks(page: pypdfium2.PdfPage) -> list[Block]:
    """A page's blocks in the order of the file, but tables first and pictures last. ``page`` must not be turned."""
    origin, (width, height) = (page.get_bbox()[0], page.get_bbox()[3]), page.get_size()
    segments = [
        segment
        for segment in _segments(page, origin)
        if 0 <= segment.left < segment.right <= width and 0 <= segment.top < segment.bottom <= height
    ]
    if not segments:
        return []
    usual = median(height for segment in segments for height in segment.heights)
    found = []
    for rows in _tables(segments, width):
        cells = {id(cell) for row in rows for cell in row}
        segments = [segment for segment in segments if id(segment) not in cells]
        found.append(_block("table", rows, width, height))
    for group in _groups(segments):
        for paragraph in _paragraphs(group):
            rows = [[segment] for segment in paragraph]
            found.append(_block(_kind(paragraph, usual, height), rows, width, height))
    for box in _pictures(page, origin, width, height):
        found.append(Block("image", _thousandths(box, width, height)))
    return found


def _segments(page: pypdfium2.PdfPage, origin: tuple[float, float]) -> list[Segment]:
    text = page.get_textpage()
    found: list[Segment] = []
    goes_on = False
    for index in range(text.count_chars()):
        character = chr(raw.FPDFText_GetUnicode(text, index))
        if character in "\r\n":
            goes_on = False
        elif character.isspace():
            if goes_on:
                found[-1].text += " "
        else:
            left, bottom, right, top = text.get_charbox(index, loose=True)
            left, top, right, bottom = left - origin[0], origin[1] - top, right - origin[0], origin[1] - bottom
            piece = Segment(character, left, top, right, bottom, [bottom - top])
            if goes_on and _continues(found[-1], piece):
                found[-1].add(piece)
            else:
                found.append(piece)
            goes_on = True
    return found


def _continues(line: Segment, next_: Segment) -> bool:
    height = max(line.height, next_.height)
    together = min(line.bottom, next_.bottom) - max(line.top, next_.top)
    return -height < next_.left - line.right < CUT * height and together > 0.4 * min(line.height, next_.height)


def _tables(segments: Sequence[Segment], width: float) -> Iterator[list[list[Segment]]]:
    """Rows of cells, each from left to right."""
    rows: list[list[Segment]] = []
    for cell in sorted((each for each in segments if each.right - each.left < CELL * width), key=_middle):
        if rows and _middle(cell) - _middle(rows[-1][0]) < 0.5 * cell.height:
            rows[-1].append(cell)
        else:
            rows.append([cell])
    table: list[list[Segment]] = []
    for row in [*rows, []]:
        if table and not (row and row[0].top - table[-1][0].bottom < ROW_GAP * row[0].height):
            if len(table) >= TABLE:
                yield table
            table = []
        if len(row) >= TABLE:
            table.append(sorted(row, key=lambda cell: cell.left))


def _middle(segment: Segment) -> float:
    return (segment.top + segment.bottom) / 2


def _groups(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that belong together, in the order of the file, each from top to bottom."""
    group = list(range(len(segments)))
    by_top = sorted(range(len(segments)), key=lambda index: segments[index].top)
    for place, one in enumerate(by_top):
        for other in by_top[place + 1 :]:
            if segments[other].top - segments[one].bottom > LEADING * segments[one].height:
                break
            if group[one] != group[other] and _together(segments[one], segments[other]):
                kept, gone = sorted((group[one], group[other]))
                group = [kept if each == gone else each for each in group]
    found: dict[int, list[Segment]] = {}
    for index, segment in enumerate(segments):
        found.setdefault(group[index], []).append(segment)
    return [sorted(each, key=lambda segment: (segment.top, segment.left)) for _, each in sorted(found.items())]


def _together(upper: Segment, lower: Segment) -> bool:
    small, tall = sorted((upper.height, lower.height))
    if tall > TALLER * small:
        return False
    across = min(upper.right, lower.right) - max(upper.left, lower.left)
    down = lower.top - upper.bottom
    if down > -0.5 * small:  # one below the other
        return across > 0.5 * min(upper.right - upper.left, lower.right - lower.left) and down < LEADING * small
    return -across < CUT * small


def _paragraphs(group: list[Segment]) -> Iterator[list[Segment]]:
    """Cut before each line that is indented between two that are not."""
    left = min(segment.left for segment in group)
    indented = [segment.left - left > INDENT * segment.height for segment in group]
    begins = [0, *(at for at in range(1, len(group) - 1) if indented[at - 1 : at + 2] == [False, True, False])]
    for begin, end in zip(begins, [*begins[1:], len(group)]):
        yield group[begin:end]


def _kind(group: Sequence[Segment], usual: float, height: float) -> str:
    top, bottom = min(each.top for each in group), max(each.bottom for each in group)
    if bottom < MARGIN * height or top > (1 - MARGIN) * height:
        if all(each.text.strip(" -–—.|").isdigit() for each in group):
            return "page_number"
        return "header" if bottom < MARGIN * height else "footer"
    return "title" if len(group) <= 3 and group[0].height > TITLE * usual else "text"


def _pictures(
    page: pypdfium2.PdfPage, origin: tuple[float, float], width: float, height: float
) -> Iterator[tuple[float, float, float, float]]:
    # Not those within forms, whose places are not the page's.
    for each in page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE], max_depth=1):
        left, bottom, right, top = each.get_bounds()
        left, right = max(0.0, left - origin[0]), min(width, right - origin[0])
        top, bottom = max(0.0, origin[1] - top), min(height, origin[1] - bottom)
        across, down = (right - left) / width, (bottom - top) / height
        if min(across, down) > LEAST_PICTURE and across * down < MOST_PICTURE:
            yield left, top, right, bottom


def _block(kind: str, rows: Sequence[Sequence[Segment]], width: float, height: float) -> Block:
    parts = [segment for row in rows for segment in row]
    box = (
        min(part.left for part in parts),
        min(part.top for part in parts),
        max(part.right for part in parts),
        max(part.bottom for part in parts),
    )
    texts = tuple(tuple(" ".join(segment.text.split()) for segment in row) for row in rows)
    return Block(kind, _thousandths(box, width, height), texts)


def _thousandths(box: tuple[float, float, float, float], width: float, height: float) -> tuple[int, int, int, int]:
    """Of the page, no side of no length."""
    left, top = (min(999, max(0, round(1000 * side / size))) for side, size in zip(box[:2], (width, height)))
    right, bottom = (min(1000, max(0, round(1000 * side / size))) for side, size in zip(box[2:], (width, height)))
    return left, top, max(right, left + 1), max(bottom, top + 1)
