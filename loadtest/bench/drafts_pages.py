"""The fixed set of pages for `drafts`: 200 held-out pages of the document model's generator in a PDF with a text layer,
the same bytes each time (`make bench NAME=drafts_pages`; two minutes on two cores).

    python loadtest/bench drafts_pages -o pages.pdf

Each page is the picture that the generator made, scanned or not, as large as `tessera parse` renders it, and on it, not
painted, the words where they stand. Tables have theirs cell by cell, formulas each sign by itself, as typesetters write
them. Every fifth page has a text layer of the harder kind: its lines in a random order, words divided at the ends of
lines, and ligatures (U+FB00 to U+FB04); its picture has neither.

PDFs with other than :data:`DIGEST` are refused: other versions of Pillow or OpenCV draw other pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import figures
from PIL import Image

if TYPE_CHECKING:
    from pages import Block, Page

sys.path += [str(figures.ROOT / "build"), str(figures.ROOT / "build" / "document_model")]
PAGES = 200
FIRST = 20_000
"""The number of the first held-out page; those that `demo` and `document_parity` read are far below."""
HARD_EVERY = 5
DIGEST = "4b3424313b9e511ab78a54f87e881a21c7691ff2f8b14cf48e6e4d69ed51f31c"
"""SHA-256 of the PDF of all pages."""
POINTS = 72 / 200
"""A pixel in points: of `tessera parse`, which renders 200 a inch."""
LIGATURES = {"ffi": "ﬃ", "ffl": "ﬄ", "ff": "ﬀ", "fi": "ﬁ", "fl": "ﬂ"}
JOINED = re.compile("ff[il]?|f[il]")
LETTERS = 0.5
"""Ems that a letter is wide, on average."""
FONT = (
    "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /FirstChar 0 /LastChar 255 "
    f"/Widths [{'500 ' * 256}] /ToUnicode 4 0 R >>"
)


@dataclass(frozen=True)
class Word:
    """``left`` and ``right`` edges and the ``middle`` of the line, in pixels of the page, down from its top."""

    text: str
    left: float
    right: float
    middle: float


def words(block: Block) -> tuple[float, list[Word]]:
    """A block's in the order in which they were drawn, and about how many pixels an em has. Raises ValueError where its
    answer is not what was drawn."""
    told = list(block.glyphs) if block.kind == "equation" else re.split(r"<\w+>|\s", block.answer)
    told = [text for text in told if text]
    if "".join(told) != block.glyphs:
        raise ValueError(f"{block.answer!r} is not what is drawn: {block.glyphs!r}")
    ends = list(accumulate(map(len, told)))
    places = [block.places[end - len(text) : end].tolist() for text, end in zip(told, ends)]
    pitches = [(each[-1][0] - each[0][0]) / (len(each) - 1) for each in places if len(each) > 1]
    usual = median(pitches or [(block.box[3] - block.box[1]) / 4])
    found = []
    for text, each in zip(told, places):
        pitch = (each[-1][0] - each[0][0]) / (len(each) - 1) if len(each) > 1 else usual
        found.append(Word(text, each[0][0] - pitch / 2, each[-1][0] + pitch / 2, each[0][1]))
    return usual / LETTERS, found


def lines(found: Sequence[Word]) -> list[list[Word]]:
    """Words by line: one begins where a word stands left of the word before it."""
    broken: list[list[Word]] = []
    for word in found:
        if not broken or word.left < broken[-1][-1].left:
            broken.append([])
        broken[-1].append(word)
    return broken


def hard(number: int) -> bool:
    """Whether a page of the set has the harder text layer."""
    return number % HARD_EVERY == HARD_EVERY - 1


def spaced(word: Word, following: Word) -> Word:
    """With the space between the two, which typesetters mostly write."""
    return replace(word, text=f"{word.text} ", right=max(word.right, following.left))


def harden(broken: list[list[Word]], dice: Random) -> None:
    """Ligatures, and at the end of about every other line the word divided, if it has the letters for it."""
    for line, below in pairwise(broken):
        text = line[-1].text
        if dice.random() < 0.5 and len(text) >= 5 and text.isalpha():
            at = dice.randint(2, len(text) - 2)
            line[-1] = replace(line[-1], text=f"{text[:at]}-")
            below[0] = replace(below[0], text=f"{text[at:]} {below[0].text}")
    for line in broken:
        line[:] = [replace(word, text=JOINED.sub(lambda found: LIGATURES[found[0]], word.text)) for word in line]


def layer(page: Page, number: int) -> list[tuple[float, list[Word]]]:
    """The page's lines in the order of its text layer, each with its size in pixels an em."""
    dice, found = Random(f"text layer/{number}"), []
    for block in page.blocks:
        size, own = words(block)
        broken = lines(own)
        if block.kind not in ("table", "equation"):
            broken = [[*map(spaced, line, line[1:]), line[-1]] for line in broken]
            if hard(number):
                harden(broken, dice)
        found += [(size, line) for line in broken]
    if hard(number):
        dice.shuffle(found)
    return found


class Pdf:
    """A PDF in the making: its objects, of which the first four are of all pages."""

    def __init__(self) -> None:
        self._objects: list[bytes] = [b""] * 4
        self._kids: list[int] = []
        self._codes: dict[str, int] = {}

    def add(self, picture: tuple[bytes, int, int], lines: Sequence[tuple[float, list[Word]]]) -> None:
        """A page: its picture as a grey JPEG with its width and height in pixels, and its text."""
        jpeg, width, height = picture
        shown = [f"q {width * POINTS:.2f} 0 0 {height * POINTS:.2f} 0 0 cm /I Do Q BT 3 Tr"]
        for size, line in lines:
            for word in line:
                text = bytes(map(self._code, word.text)).hex()
                wide = 100 * (word.right - word.left) / (LETTERS * size * len(word.text))
                at = word.left * POINTS, (height - word.middle - 0.3 * size) * POINTS
                shown.append(f"/F {size * POINTS:.2f} Tf {wide:.1f} Tz 1 0 0 1 {at[0]:.2f} {at[1]:.2f} Tm <{text}> Tj")
        content = self._stream("\n".join([*shown, "ET"]).encode())
        told = f"/Type /XObject /Subtype /Image /Width {width} /Height {height} /BitsPerComponent 8"
        image = self._stream(jpeg, f"{told} /ColorSpace /DeviceGray /Filter /DCTDecode")
        box = f"/MediaBox [0 0 {width * POINTS:.2f} {height * POINTS:.2f}] /Contents {content} 0 R"
        resources = f"/Resources << /Font << /F 3 0 R >> /XObject << /I {image} 0 R >> >>"
        self._kids.append(self._object(f"<< /Type /Page /Parent 2 0 R {box} {resources} >>".encode()))

    def _code(self, sign: str) -> int:
        # ASCII is itself, for some readers take code 32 for a space and those below for none at all.
        return self._codes.setdefault(
            sign, ord(sign) if sign.isascii() else 161 + sum(c > 127 for c in self._codes.values())
        )

    def _object(self, body: bytes) -> int:
        self._objects.append(body)
        return len(self._objects)

    def _stream(self, data: bytes, told: str = "") -> int:
        return self._object(f"<< {told} /Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream")

    def bytes(self) -> bytes:
        """The file. Raises ValueError where pages have more signs than a font has codes."""
        if max(self._codes.values()) > 255:
            raise ValueError(f"{len(self._codes)} different signs are more than a font has codes for")
        named = "\n".join(f"<{code:02x}> <{ord(sign):04x}>" for sign, code in self._codes.items())
        unicode = (
            "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapType 2 def\n"
            f"1 begincodespacerange <00> <ff> endcodespacerange\n{len(self._codes)} beginbfchar\n{named}\nendbfchar\n"
            "endcmap end end"
        )
        kids = " ".join(f"{kid} 0 R" for kid in self._kids)
        self._objects[:4] = [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            f"<< /Type /Pages /Kids [{kids}] /Count {len(self._kids)} >>".encode(),
            FONT.encode(),
            f"<< /Length {len(unicode)} >>\nstream\n{unicode}\nendstream".encode(),
        ]
        out, places = io.BytesIO(b"%PDF-1.5\n%\xe2\xe3\xcf\xd3\n"), []
        out.seek(0, io.SEEK_END)
        for number, body in enumerate(self._objects, 1):
            places.append(out.tell())
            out.write(f"{number} 0 obj\n".encode() + body + b"\nendobj\n")
        end = out.tell()
        table = "".join(f"{place:010d} 00000 n \n" for place in places)
        out.write(f"xref\n0 {len(places) + 1}\n0000000000 65535 f \n{table}".encode())
        out.write(f"trailer << /Size {len(places) + 1} /Root 1 0 R >>\nstartxref\n{end}\n%%EOF\n".encode())
        return out.getvalue()


def drawn(number: int) -> tuple[Any, Any]:
    """A page of the set: what :meth:`Pdf.add` takes."""
    import pages

    page = pages.sample(FIRST + number, "heldout")
    picture, buffer = Image.fromarray(page.picture), io.BytesIO()
    picture.save(buffer, "JPEG", quality=92)
    return (buffer.getvalue(), *picture.size), layer(page, number)


def write(path: Path, count: int = PAGES) -> str:
    """Writes the first ``count`` pages; the file's digest."""
    pdf = Pdf()
    with ProcessPoolExecutor() as pool:
        for picture, found in pool.map(drawn, range(count), chunksize=4):
            pdf.add(picture, found)
    path.write_bytes(pdf.bytes())
    return digest(path)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(path: Path) -> None:
    """Raises SystemExit where it is not the set."""
    if not path.exists() or digest(path) != DIGEST:
        raise SystemExit(f'{path} is not the set of pages: make bench NAME=drafts_pages ARGS="-o {path}"')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("pages.pdf"))
    found = write(parser.parse_args().out)
    if found != DIGEST:
        print(f"drafts_pages: the digest is {found}, not {DIGEST}", file=sys.stderr)
    return int(found != DIGEST)
