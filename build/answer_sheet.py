"""A picture of pictures: each with what was asked and answered beneath it."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CELL = (420, 315)  # most width and height of a picture, pixels
GAP, LINE = 10, 17
LETTERS, LINES = 48, 6  # of a line, and of an entry's text
FONT = Path(__file__).parent / "document_model" / "pages" / "fonts" / "Cousine-Regular.ttf"
RIGHT, WRONG = "#1a7f37", "#cf222e"


@dataclass(frozen=True)
class Entry:
    """``lines``: texts and their colours; long ones are broken, and cut."""

    picture: Image.Image
    lines: Sequence[tuple[str, str]]


def write(path: Path, entries: Sequence[Entry], columns: int = 3, most_bytes: int | None = None) -> None:
    """A JPEG file, or a lossless WebP file of few colours, by the path's ending; made smaller until it has no more than
    ``most_bytes``."""
    cells = [_cell(entry) for entry in entries]
    heights = [max(cell.height for cell in cells[at : at + columns]) for at in range(0, len(cells), columns)]
    sheet = Image.new("RGB", (columns * (CELL[0] + GAP), sum(heights)), "white")
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        sheet.paste(cell, (column * (CELL[0] + GAP), sum(heights[:row])))
    while len(data := _encoded(sheet, path.suffix)) > (most_bytes or len(data)):
        sheet = sheet.resize((sheet.width * 9 // 10, sheet.height * 9 // 10), Image.Resampling.LANCZOS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _cell(entry: Entry) -> Image.Image:
    picture = entry.picture.convert("RGB")
    picture.thumbnail(CELL, Image.Resampling.LANCZOS)
    lines = [
        (line, colour)
        for text, colour in entry.lines
        for line in textwrap.wrap(text, LETTERS, max_lines=LINES, placeholder=" ...")
    ]
    cell = Image.new("RGB", (CELL[0] + GAP, picture.height + LINE * len(lines) + 2 * GAP), "white")
    cell.paste(picture, ((cell.width - picture.width) // 2, 0))
    font = ImageFont.truetype(FONT, 14)
    for number, (line, colour) in enumerate(lines):
        ImageDraw.Draw(cell).text((GAP, picture.height + LINE * number + GAP // 2), line, colour, font)
    return cell


def _encoded(sheet: Image.Image, suffix: str) -> bytes:
    file = io.BytesIO()
    if suffix == ".webp":
        few = sheet.quantize(64, dither=Image.Dither.NONE).convert("RGB")
        few.save(file, "WebP", lossless=True, quality=100)
    else:
        sheet.save(file, "JPEG", quality=85)
    return file.getvalue()
