"""One picture of what was read worst, for the model card: true answers beside those read, and pages with boxes.

Written by `evaluate.py documents --failures`.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import document_scores as scores
import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, LEFT, HIGHEST = 1100, 500, 300  # pixels: of the sheet, of its column of pictures, of a picture
GAP = 12
MOST_BYTES = 300_000
LETTERS, LINES = 66, 6
FONT = Path(__file__).parents[1] / "document_model" / "pages" / "fonts" / "Cousine-Regular.ttf"
TRUE, READ = "#1a7f37", "#cf222e"


@dataclass(frozen=True)
class Failure:
    """``step`` and ``kind`` as of a Sample; ``error``: its share, 0..1; ``picture`` uint8 [height, width]."""

    step: str
    kind: str
    error: float
    picture: np.ndarray
    expected: str
    got: str


def chosen(failures: Sequence[Failure], each: int) -> list[Failure]:
    """The worst ``each`` of each step, the worst first."""
    seen: Counter[str] = Counter()
    found = []
    for failure in sorted(failures, key=lambda failure: -failure.error):
        seen[failure.step] += 1
        if failure.error > 0 and seen[failure.step] <= each:
            found.append(failure)
    return found


def sheet(failures: Sequence[Failure]) -> bytes:
    """A lossless WebP file of at most MOST_BYTES."""
    rows = [_row(failure) for failure in failures]
    picture = Image.new("RGB", (WIDTH, GAP + sum(row.height + GAP for row in rows)), "white")
    top = GAP
    for row in rows:
        picture.paste(row, (0, top))
        top += row.height + GAP
    while len(data := _webp(picture)) > MOST_BYTES:
        picture = picture.resize((picture.width * 9 // 10, picture.height * 9 // 10), Image.Resampling.LANCZOS)
    return data


def _row(failure: Failure) -> Image.Image:
    picture = Image.fromarray(failure.picture).convert("RGB")
    if failure.step == "layout":
        draw = ImageDraw.Draw(picture)
        for answer, color in ((failure.expected, TRUE), (failure.got, READ)):
            for _, box in scores.blocks(answer):
                draw.rectangle([side / 1000 * picture.width for side in box], outline=color, width=4)
    picture.thumbnail((LEFT - GAP, HIGHEST), Image.Resampling.LANCZOS)
    lines = list(_lines(failure))
    row = Image.new("RGB", (WIDTH, max(picture.height, 16 * len(lines) + 4)), "white")
    row.paste(picture, (GAP, 0))
    font = ImageFont.truetype(FONT, 14)
    for number, (line, color) in enumerate(lines):
        ImageDraw.Draw(row).text((LEFT + GAP, 16 * number), line, color, font)
    return row


def _lines(failure: Failure) -> Iterator[tuple[str, str]]:
    """(text, colour) of each line beside the picture."""
    yield f"{failure.kind}: error {failure.error:.0%}", "black"
    for words, answer, color in (("true", failure.expected, TRUE), ("read", failure.got, READ)):
        if failure.step == "layout":
            answer = ", ".join(
                f"{count} {kind}" for kind, count in Counter(k for k, _ in scores.blocks(answer)).items()
            )
        shown = textwrap.wrap(f"{words}: {answer}", LETTERS, max_lines=LINES, placeholder=" ...")
        yield from ((line, color) for line in shown)


def _webp(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    few = picture.quantize(64, dither=Image.Dither.NONE).convert("RGB")
    few.save(file, "WebP", lossless=True, quality=100, method=6)
    return file.getvalue()
