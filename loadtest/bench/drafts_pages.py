"""The pages of the benchmark `drafts`: 200 held-out pages of the document model's generator in a PDF with a text layer,
the same bytes each time (`make bench NAME=drafts_pages`; two minutes on two cores).

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
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import figures
from PIL import Image

if TYPE_CHECKING:
    from pages import Block, Page

sys.path += [str(figures.ROOT / "build"), str(figures.ROOT / "build" / "document_model")]
PAGES, FIRST = 200, 20_000
"""How many, and the number of the first held-out one; those that `demo` and `document_parity` read are far below."""
HARD_EVERY = 5
DIGEST = "4b3424313b9e511ab78a54f87e881a21c7691ff2f8b14cf48e6e4d69ed51f31c"
"""SHA-256 of the PDF of all pages."""
POINTS = 72 / 200
"""A pixel in points: of `tessera parse`, which renders 200 a inch."""
LIGATURES = {"ffi": "ﬃ", "ffl": "ﬄ", "ff": "ﬀ", "fi": "ﬁ", "fl": "ﬂ"}
LETTERS = 0.5
"""Ems that a letter is wide, on average."""
FONT = (
    "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /FirstChar 0 /LastChar 255 "
    f"/Widths [{'500 ' * 256}] /ToUnicode 4 0 R >>"
)


class Word(NamedTuple):
    """``left`` and ``right`` edges and the ``middle`` of the line, in pixels of the page, down from its top."""

    text: str
    left: float
    right: float
    middle: float


Lines = Sequence[tuple[float, Sequence[Word]]]
"""Each with its size in pixels an em, in the order of a text layer."""


def words(block: Block) -> tuple[float, list[Word]]:
    """A block's in the order in which they were drawn, and about how many pixels an em has. Raises ValueError where its
    answer is not what was drawn."""
    told = list(block.glyphs) if block.kind == "equation" else re.split(r"<\w+>|\s", block.answer)
    told = [text for text in told if text]
    if "".join(told) != block.glyphs:
        raise ValueError(f"{block.answer!r} is not what is drawn: {block.glyphs!r}")
    places = [block.places[end - len(text) : end].tolist() for text, end in zip(told, accumulate(map(len, told)))]
    pitches = [(each[-1][0] - each[0][0]) / (len(each) - 1) if len(each) > 1 else None for each in places]
    usual = median([pitch for pitch in pitches if pitch is not None] or [(block.box[3] - block.box[1]) / 4])
    halves = [(usual if pitch is None else pitch) / 2 for pitch in pitches]
    edges = [(each[0][0] - half, each[-1][0] + half, each[0][1]) for each, half in zip(places, halves)]
    return usual / LETTERS, [Word(text, *edge) for text, edge in zip(told, edges)]


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


def harden(broken: list[list[Word]], dice: Random) -> None:
    """Ligatures, and at the end of about every other line the word divided, if it has the letters for it."""
    for line, below in pairwise(broken):
        text = line[-1].text
        if dice.random() < 0.5 and len(text) >= 5 and text.isalpha():
            at = dice.randint(2, len(text) - 2)
            line[-1] = line[-1]._replace(text=f"{text[:at]}-")
            below[0] = below[0]._replace(text=f"{text[at:]} {below[0].text}")
    for line in broken:
        line[:] = [each._replace(text=re.sub("ff[il]?|f[il]", lambda found: LIGATURES[found[0]], each.text))
                   for each in line]  # fmt: skip


def layer(page: Page, number: int) -> Lines:
    """The page's lines; but for tables and formulas a word has the space behind it, as typesetters mostly write it."""
    dice, found = Random(f"text layer/{number}"), []
    for block in page.blocks:
        size, own = words(block)
        broken = lines(own)
        if block.kind not in ("table", "equation"):
            for line in broken:
                line[:-1] = [one._replace(text=f"{one.text} ", right=max(one.right, other.left))
                             for one, other in pairwise(line)]  # fmt: skip
            if hard(number):
                harden(broken, dice)
        found += [(size, line) for line in broken]
    if hard(number):
        dice.shuffle(found)
    return found


def stream(data: bytes, told: str = "<< ") -> bytes:
    return f"{told} /Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream"


def page_objects(codes: dict[str, int], first: int, jpeg: bytes, width: int, height: int, lines: Lines) -> list[bytes]:
    """A page's three objects, of which ``first`` is the first's number: its text, its picture in grey, and itself.
    ``codes`` of signs, to which its own are added."""
    shown = [f"q {width * POINTS:.2f} 0 0 {height * POINTS:.2f} 0 0 cm /I Do Q BT 3 Tr"]
    for size, word in ((size, word) for size, line in lines for word in line):
        for sign in word.text:  # ASCII is itself, for some readers take code 32 for a space, those below for none
            codes.setdefault(sign, ord(sign) if sign.isascii() else 161 + sum(code > 127 for code in codes.values()))
        text = bytes(codes[sign] for sign in word.text).hex()
        wide = 100 * (word.right - word.left) / (LETTERS * size * len(word.text))
        at = f"{word.left * POINTS:.2f} {(height - word.middle - 0.3 * size) * POINTS:.2f}"
        shown.append(f"/F {size * POINTS:.2f} Tf {wide:.1f} Tz 1 0 0 1 {at} Tm <{text}> Tj")
    image = f"<< /Type /XObject /Subtype /Image /Width {width} /Height {height} /BitsPerComponent 8"
    box = f"/MediaBox [0 0 {width * POINTS:.2f} {height * POINTS:.2f}] /Contents {first} 0 R"
    resources = f"/Resources << /Font << /F 3 0 R >> /XObject << /I {first + 1} 0 R >> >>"
    page = f"<< /Type /Page /Parent 2 0 R {box} {resources} >>"
    coloured = stream(jpeg, f"{image} /ColorSpace /DeviceGray /Filter /DCTDecode")
    return [stream("\n".join([*shown, "ET"]).encode()), coloured, page.encode()]


def pdf(pages: Iterable[tuple[bytes, int, int, Lines]]) -> bytes:
    """Of what :func:`drawn` gives for each. Raises ValueError where pages have more signs than a font has codes."""
    codes: dict[str, int] = {}
    objects = [b""] * 4
    for page in pages:
        objects += page_objects(codes, len(objects) + 1, *page)
    if max(codes.values()) > 255:
        raise ValueError(f"{len(codes)} different signs are more than a font has codes for")
    named = "\n".join(f"<{code:02x}> <{ord(sign):04x}>" for sign, code in codes.items())
    unicode = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapType 2 def\n"
        f"1 begincodespacerange <00> <ff> endcodespacerange\n{len(codes)} beginbfchar\n{named}\nendbfchar\n"
        "endcmap end end"
    )
    kids = range(7, len(objects) + 1, 3)
    tree = f"<< /Type /Pages /Kids [{' '.join(f'{kid} 0 R' for kid in kids)}] /Count {len(kids)} >>"
    objects[:4] = b"<< /Type /Catalog /Pages 2 0 R >>", tree.encode(), FONT.encode(), stream(unicode.encode(), "<<")
    out, table = bytearray(b"%PDF-1.5\n%\xe2\xe3\xcf\xd3\n"), "0000000000 65535 f \n"
    for number, body in enumerate(objects, 1):
        table += f"{len(out):010d} 00000 n \n"
        out += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    count, end = len(objects) + 1, len(out)
    out += f"xref\n0 {count}\n{table}trailer << /Size {count} /Root 1 0 R >>\nstartxref\n{end}\n%%EOF\n".encode()
    return bytes(out)


def drawn(number: int) -> tuple[bytes, int, int, Lines]:
    """A page of the set: its picture as a JPEG, its width and height in pixels, and its text."""
    import pages

    page, buffer = pages.sample(FIRST + number, "heldout"), io.BytesIO()
    picture = Image.fromarray(page.picture)
    picture.save(buffer, "JPEG", quality=92)
    return buffer.getvalue(), *picture.size, layer(page, number)


def write(path: Path, count: int = PAGES) -> str:
    """Writes the first ``count`` pages; the file's digest."""
    with ProcessPoolExecutor() as pool:
        path.write_bytes(pdf(pool.map(drawn, range(count), chunksize=4)))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(path: Path) -> None:
    """Raises SystemExit where it is not the set."""
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != DIGEST:
        raise SystemExit(f'{path} is not the set of pages: make bench NAME=drafts_pages ARGS="-o {path}"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("pages.pdf"))
    path = parser.parse_args().out
    write(path)
    check(path)
