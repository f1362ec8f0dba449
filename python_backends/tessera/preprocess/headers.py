"""Sizes and orientation of JPEG, PNG and WebP from their headers, as Pillow reads them: no pixel is decoded.

Every function raises ValueError with a short reason when the bytes are not what they claim.
"""

import io
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL.ExifTags import Base
from PIL.Image import Image
from PIL.JpegImagePlugin import JpegImageFile, get_sampling
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
# Formats that are recognised but not supported, by the pattern that their files begin with.
OTHERS = {b"GIF8": "GIF", b"BM": "BMP", rb"II\*\0|MM\0\*": "TIFF", b"%PDF": "PDF", b"....ftyp": "HEIC, AVIF or video"}
READERS: dict[str, Callable[[io.BytesIO], Image]] = {"JPEG": JpegImageFile, "PNG": PngImageFile, "WebP": WebPImageFile}
# Chunks and header segments are read one by one, and a hostile file has millions.
MOST_CHUNKS = 50_000
# Of a header; each read counts as READ_COST bytes. Pillow joins EXIF segments in a time that grows with their square.
MOST_BYTES = 16 << 20
READ_COST = 64
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
PNG_FRAMES = (b"IDAT", b"acTL", b"fcTL", b"fdAT")
WEBP_PIXELS = (b"VP8 ", b"VP8L")
WEBP_KEPT = (b"VP8X", b"ALPH", *WEBP_PIXELS)
# Pixels (across, down) that share a chroma sample, by Pillow's number for it.
CHROMA_STEPS = {0: (1, 1), 1: (2, 1), 2: (2, 2)}


@dataclass(frozen=True)
class Header:
    """``width`` x ``height`` as stored, before ``orientation`` (1..8) is applied. ``passes``: JPEG scans.

    ``chroma_step``: of a baseline YCbCr JPEG of one scan, how many pixels (across, down) share a chroma sample, where
    that is 1x1, 2x1 or 2x2; None for anything else.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    passes: int = 1
    chroma_step: tuple[int, int] | None = None

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) after rotation: orientations 5..8 lie on their side."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def image_format(data: bytes) -> str | None:
    """ "JPEG", "PNG" or "WebP" by the first bytes; None for anything else."""
    for name, magic in MAGIC.items():
        if data.startswith(magic):
            return name
    return "WebP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


class _BoundedFile(io.BytesIO):
    """Raises ValueError where a header goes on and on. What is read as a whole at once is not counted."""

    left = MOST_BYTES

    def read(self, size: int | None = -1) -> bytes:
        self.left -= max(size or 0, 0) + READ_COST
        if self.left < 0:
            raise ValueError("it has too many segments, or too much metadata; save it again")
        return super().read(size)


def read_header(data: bytes) -> Header:
    """The header of encoded bytes. Raises ValueError also for a file that ends before its picture does."""
    name = image_format(data)
    if name is None:
        found = next((other for magic, other in OTHERS.items() if re.match(magic, data, re.DOTALL)), None)
        raise ValueError(
            f"has the format {found}; send JPEG, PNG or WebP" if found else "is not a JPEG, PNG or WebP picture"
        )
    if name == "WebP" and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise ValueError("is a truncated WebP; send the whole file")
    # A PNG without its frames: Pillow would decode them on its way to the metadata behind them.
    file = _BoundedFile(_png_of(data, lambda kind: kind not in PNG_FRAMES) if name == "PNG" else data)
    try:
        image = READERS[name](file)
    except Exception as error:  # damaged files make it raise all sorts
        raise ValueError(f"is a {name} whose header cannot be read: {error}") from None
    if name == "WebP" and data[12:16] == b"VP8X" and data[20] & 0x02:
        raise ValueError("is an animated WebP; send a still picture")
    passes, step = _scans(image, data, file.tell()) if isinstance(image, JpegImageFile) else (1, None)
    return Header(name, image.width, image.height, _orientation(image), passes, step)


def _orientation(image: Image) -> int:
    """1..8 as Pillow's exif_transpose has it: EXIF's, else the one in the XMP packet, else 1."""
    try:
        stated = Image.getexif(image).get(Base.Orientation, 1)  # a PNG's own getexif decodes it
    except Exception:  # damaged metadata turns nothing
        return 1
    return int(stated) if stated in range(1, 9) else 1


def _scans(image: JpegImageFile, data: bytes, start: int) -> tuple[int, tuple[int, int] | None]:
    """See Header: ``passes`` and ``chroma_step`` of a JPEG whose first scan begins at ``start``."""
    # In scan data a 0xFF is always followed by a zero or a marker, so both searches find markers only. The first goes
    # from the end, where a whole file has it; numpy, since bytes.count stops at every 0xFF and takes four times longer.
    if data.rfind(b"\xff\xd9", start) < 0:
        raise ValueError("is a truncated JPEG (no end-of-image marker); send the whole file")
    adobe = image.info.get("adobe_transform")  # its colour transform
    if image.mode == "CMYK" and adobe is None:
        raise ValueError("is a CMYK JPEG without an Adobe marker, whose polarity is unknown; send RGB")
    scan = np.frombuffer(data, dtype=np.uint8, offset=start)
    passes = 1 + int(np.count_nonzero((scan[:-1] == 0xFF) & (scan[1:] == 0xDA)))
    # As libjpeg decides, but for a file whose markers contradict each other.
    is_ycbcr = adobe == 1 or (
        adobe is None and ("jfif" in image.info or [part[0] for part in image.layer] == [1, 2, 3])
    )
    is_baseline = struct.pack(">HHBHHB", 0xFFC0, 17, 8, image.height, image.width, 3) in data[:start]
    return passes, CHROMA_STEPS.get(get_sampling(image)) if passes == 1 and is_ycbcr and is_baseline else None


def plain_png(data: bytes) -> bytes:
    """The same picture without metadata, colour profiles and animation: only what decoding its first frame needs."""
    return _png_of(data, PNG_KEPT.__contains__)


def _png_of(data: bytes, kept: Callable[[bytes], bool]) -> bytes:
    """The chunks of a PNG whose type is ``kept``, up to IEND."""
    parts, at = [data[:8]], 8
    for _ in range(MOST_CHUNKS):
        length, kind = struct.unpack(">I4s", data[at : at + 8].ljust(8, b"\xff"))
        start, at = at, at + 12 + length
        if at > len(data):
            raise ValueError("is a truncated PNG; send the whole file")
        if kept(kind):
            parts.append(data[start:at])
        if kind == b"IEND":
            return b"".join(parts)
    raise ValueError(f"has more than {MOST_CHUNKS} chunks; save it again")


def plain_webp(data: bytes) -> bytes:
    """The same picture without metadata, which a decoder of damaged pixels would read on into."""
    parts, at = [], 12
    for _ in range(MOST_CHUNKS):
        kind, length = struct.unpack_from("<4sI", data, at)
        start, at = at, at + 8 + length + (length & 1)
        if kind in WEBP_KEPT:
            parts.append(data[start:at])
        if kind in WEBP_PIXELS:  # the last that counts
            break
    kept = b"".join(parts)
    return b"RIFF" + struct.pack("<I", 4 + len(kept)) + b"WEBP" + kept
