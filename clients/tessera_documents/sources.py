"""What is to be parsed: the files, and their pages as pictures, one at a time.

PDFium takes one thread only: whatever is opened here is rendered and closed by the thread that opened it.

Which pages of each document are read: ``1-3,7,10-``.
"""

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pypdfium2
from PIL import Image, ImageOps, UnidentifiedImageError

from tessera_client.pictures import kind_of, open_checked
from tessera_documents.text_layer import TextLayer
from tessera_jobs.source import below
from tessera_wire.command_line import missing
from tessera_wire.errors import InvalidRequest

SUFFIXES = (".pdf", ".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")
"""Of the files in a folder that count. A file that is named counts whatever its name."""
POINTS_PER_INCH = 72
LONGEST_SIDE = 3500  # pixels of a rendered page, whatever its paper; MinerU's own bound


class BadDocument(Exception):
    """Why a file, or a page of it, cannot be read."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file to parse, and the folder below the output that its results go to."""

    path: Path
    folder: Path


def find(paths: Sequence[Path], out: Path) -> list[Source]:
    """The files at ``paths``, folders with all below them, in order and each once.

    What lies in ``out``, and what is hidden inside a folder, is passed over. Raises InvalidRequest for a path where
    nothing is, a folder without documents, and results that would go where a file is or another file's go.
    """
    found: dict[Path, Source] = {}
    names: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise InvalidRequest(missing(path))
        files = list(map(Path, below(path, SUFFIXES, out.resolve()))) if path.is_dir() else [path]
        if not files:
            raise InvalidRequest(f"{path} holds no documents", f"of a folder, these are parsed: {' '.join(SUFFIXES)}")
        for file in files:
            folder = file.relative_to(path) if path.is_dir() else Path(file.name)
            place = found.setdefault(file.resolve(), Source(file, folder))
            other = names.setdefault(place.folder, place.path)
            if (out / folder).is_file():
                raise InvalidRequest(f"{out / folder} is a file, and would be the folder of results", "give another -o")
            if other != place.path:
                raise InvalidRequest(
                    f"{other} and {file} would both be written to {out / folder}", "give the folder that holds both"
                )
    return list(found.values())


class Pdf:
    """An open file. Like :class:`Picture` it has its ``pages``' number, renders one of them (from 0) as RGB, and tells
    its text."""

    def __init__(self, path: Path, password: str | None) -> None:
        self._pdf = pypdfium2.PdfDocument(path, password=password)
        self._pdf.init_forms()  # so that what was filled in is drawn
        self.pages = len(self._pdf)

    def render(self, page: int, dpi: int) -> Image.Image:
        sheet = self._pdf[page]
        try:
            scale = min(dpi / POINTS_PER_INCH, LONGEST_SIDE / max(sheet.get_size()))
            return sheet.render(scale=scale, rev_byteorder=True).to_pil()
        finally:
            sheet.close()

    def text(self, page: int) -> TextLayer | None:
        """None of a scan, and where it cannot be read."""
        sheet = self._pdf[page]
        try:
            return TextLayer.of(sheet)
        except pypdfium2.PdfiumError:
            return None
        finally:
            sheet.close()

    def close(self) -> None:
        self._pdf.close()


class Picture:
    """As :class:`Pdf`; each page keeps its own size, whatever the resolution."""

    def __init__(self, path: Path) -> None:
        self._image = Image.open(path)
        # The frames of a TIFF are the pages of a scan or a fax.
        self.pages = getattr(self._image, "n_frames", 1) if self._image.format == "TIFF" else 1

    def render(self, page: int, dpi: int) -> Image.Image:
        if page:
            self._image.seek(page)
        upright = ImageOps.exif_transpose(self._image)
        if upright.mode.startswith("I"):  # 16 bits, which `convert` would clip to white
            return upright.convert("I").point(lambda level: level * (1 / 256)).convert("RGB")
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        white = Image.new("RGBA", upright.size, "white")  # not black, which is what dropping the alpha would leave
        return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")

    def text(self, page: int) -> None:
        """It has none."""

    def close(self) -> None:
        self._image.close()


Document = Pdf | Picture


def open_document(path: Path, password: str | None = None) -> Document:
    """Opens a file for what its first bytes say it is; ``password``: of PDFs that want one. Raises BadDocument."""
    try:
        with open_checked(path, _check_regular) as file:
            return Pdf(path, password) if b"%PDF-" in file.read(1024) else Picture(path)
    except BadDocument:
        raise
    except pypdfium2.PdfiumError as error:
        # Not by the code alone: where there are no pages, PDFium gives that of the file before.
        if error.err_code != pypdfium2.raw.FPDF_ERR_PASSWORD or not _is_encrypted(path):
            raise BadDocument("the PDF is damaged or has no pages") from None
        wants = "wants a password" if password is None else "is not opened by the password that was given"
        raise BadDocument(f"the PDF is encrypted and {wants}") from None
    except UnidentifiedImageError:
        raise BadDocument("neither a PDF nor a picture") from None
    except Exception as error:  # decoders raise anything
        raise BadDocument(str(error) or type(error).__name__) from error


def digest(path: Path) -> str:
    """Of the file's bytes, as hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    with open_checked(path, _check_regular) as file:
        while piece := file.read(1 << 20):
            state.update(piece)
    return state.hexdigest()


def _check_regular(about: os.stat_result) -> None:
    """A pipe would be waited for, and a device never ends. Raises BadDocument."""
    if not stat.S_ISREG(about.st_mode):
        raise BadDocument(f"it is {kind_of(about.st_mode)}, not a file")


def _is_encrypted(path: Path) -> bool:
    with open_checked(path, _check_regular) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"/Encrypt") >= 0


RANGE = re.compile(r"\s*(\d+)\s*(?:(-)\s*(\d*)\s*)?")


class PageRanges:
    """``text``: numbers from 1 and ranges with commas between, an open one to the last page. Raises InvalidRequest."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ranges = [self._range(part) for part in text.split(",")]

    def _range(self, part: str) -> tuple[int, int | None]:
        found = RANGE.fullmatch(part)
        first = int(found[1]) if found else 0
        last = first if found and not found[2] else int(found[3]) if found and found[3] else None
        if not found or first < 1 or (last is not None and last < first):
            raise InvalidRequest(f"--pages {self._text!r}: {part!r} is no page or range of pages", "as in 1-3,7,10-")
        return first, last

    def of(self, pages: int) -> list[int]:
        """Those of a document of ``count`` pages, counted from 0."""
        ends = [(first, pages if last is None else min(last, pages)) for first, last in self._ranges]
        return sorted({page - 1 for first, last in ends for page in range(first, last + 1)})
