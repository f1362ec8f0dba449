"""Sizes and orientation of JPEG, PNG and WebP from their headers: nothing is decoded, nothing is allocated.

Every function raises ValueError with a short reason when the bytes are not what they claim.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
OTHERS = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF"}
# Chunks and header segments are walked one by one, and a hostile file has millions.
MOST_PARTS = 50_000
UNKNOWN = "is not a JPEG, PNG or WebP picture"
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


@dataclass(frozen=True)
class Header:
    """``width`` x ``height`` as stored, before ``orientation`` (EXIF, 1..8) is applied. ``passes``: JPEG scans.

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


def other_format(data: bytes) -> str | None:
    """The name of a format that is recognised but not supported."""
    if data[4:8] == b"ftyp":
        return "HEIC, AVIF or video"
    return next((name for magic, name in OTHERS.items() if data.startswith(magic)), None)


def read_header(data: bytes) -> Header:
    """The header of encoded bytes. Raises ValueError also for a file that ends before its picture does."""
    reader = {"JPEG": _jpeg, "PNG": _png, "WebP": _webp}.get(image_format(data) or "")
    if reader is None:
        found = other_format(data)
        raise ValueError(f"has the format {found}; send JPEG, PNG or WebP" if found else UNKNOWN)
    try:
        header = reader(data)
    except (struct.error, IndexError):
        raise ValueError("ends inside its header") from None
    if header.width < 1 or header.height < 1:
        raise ValueError(f"states a size of {header.width}x{header.height}; both must be at least 1")
    return header


def _parts() -> Iterator[int]:
    """Counts a file's parts; raises ValueError at too many."""
    yield from range(MOST_PARTS)
    raise ValueError(f"has more than {MOST_PARTS} segments or chunks; save it anew")


def _jpeg(data: bytes) -> Header:
    at, orientation, jfif = 2, 1, False
    adobe: int | None = None  # the colour transform that Adobe's marker states
    frame: tuple[int, int, int, int] | None = None
    frame_at = 0
    for _ in _parts():
        if data[at] != 0xFF:
            raise ValueError("is a JPEG with a damaged header")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # stand alone
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2 or marker == 0xD9:
            raise ValueError("is a JPEG with a damaged header")
        body = at + 4
        if marker == 0xE1 and data[body : body + 6] == b"Exif\0\0":
            orientation = _exif_orientation(data[body + 6 : at + 2 + length])
        elif marker == 0xE0 and data[body : body + 5] == b"JFIF\0":
            jfif = True
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, frame_at = struct.unpack_from(">BHHB", data, body), at
            if frame[0] != 8:
                raise ValueError(f"is a JPEG of {frame[0]} bits a sample; 8 are supported")
        elif marker == 0xEE and data[body : body + 5] == b"Adobe":
            adobe = data[body + 11]
        elif marker == 0xDA:
            break
        at += 2 + length
    if frame is None:
        raise ValueError("is a JPEG without a frame header")
    # In scan data a 0xFF is always followed by a zero or a marker, so both searches find markers only. The first goes
    # from the end, where a whole file has it; numpy, since bytes.count stops at every 0xFF and takes four times longer.
    if data.rfind(b"\xff\xd9", at) < 0:
        raise ValueError("is a truncated JPEG (no end-of-image marker); send the whole file")
    _, height, width, components = frame
    if components == 4 and adobe is None:
        raise ValueError("is a CMYK JPEG without an Adobe marker, whose polarity is unknown; send RGB")
    scan = np.frombuffer(data, dtype=np.uint8, offset=at)
    passes = np.count_nonzero((scan[:-1] == 0xFF) & (scan[1:] == 0xDA))
    step = _chroma_step(data[frame_at : frame_at + 19], jfif, adobe) if passes == 1 else None
    return Header("JPEG", width, height, orientation, int(passes), step)


def _chroma_step(frame: bytes, jfif: bool, adobe: int | None) -> tuple[int, int] | None:
    """See Header; ``frame`` is the frame segment with its marker, of which only baseline (0xC0) counts.

    Which three components are YCbCr: as libjpeg decides, but for a file whose markers contradict each other.
    """
    if len(frame) < 19 or frame[1] != 0xC0 or frame[9] != 3:
        return None
    ids, (luma, *chroma) = frame[10:19:3], frame[11:19:3]
    ycbcr = adobe == 1 or (adobe is None and (jfif or ids == b"\1\2\3"))
    step = luma >> 4, luma & 15
    return step if ycbcr and chroma == [0x11, 0x11] and step in ((1, 1), (2, 1), (2, 2)) else None


def _exif_orientation(exif: bytes) -> int:
    """Tag 0x0112 of the first directory of a TIFF block; 1 if it is absent or damaged."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for index in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, start + 2 + 12 * index)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk, up to and including IEND."""
    chunks, at = [], 8
    for _ in _parts():
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise ValueError("is a truncated PNG; send the whole file")
        chunks.append((kind, at, end))
        if kind == b"IEND":
            return chunks
        at = end
    raise AssertionError("unreachable")


def plain_png(data: bytes) -> bytes:
    """The same picture without metadata, colour profiles and animation: only what decoding its first frame needs."""
    return data[:8] + b"".join(data[start:end] for kind, start, end in png_chunks(data) if kind in PNG_KEPT)


def _png(data: bytes) -> Header:
    try:
        chunks = png_chunks(data)
    except struct.error:
        raise ValueError("is a truncated PNG; send the whole file") from None
    if chunks[0][0] != b"IHDR":
        raise ValueError("is a PNG whose first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    exif = next((data[start + 8 : end - 4] for kind, start, end in chunks if kind == b"eXIf"), b"")
    return Header("PNG", width, height, _exif_orientation(exif))


def _webp(data: bytes) -> Header:
    (size,) = struct.unpack_from("<I", data, 4)
    if size + 8 > len(data):
        raise ValueError("is a truncated WebP; send the whole file")
    canvas: tuple[int, int] | None = None
    picture: tuple[int, int] | None = None
    orientation, at = 1, 12
    for _ in _parts():
        if at + 8 > size + 8:
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        body = at + 8
        if kind == b"VP8X":
            flags = data[body]
            if flags & 0x02:
                raise ValueError("is an animated WebP; send a still picture")
            canvas = (1 + _uint24(data, body + 4), 1 + _uint24(data, body + 7))
        elif kind == b"VP8 " and picture is None:
            if data[body + 3 : body + 6] != b"\x9d\x01\x2a":
                raise ValueError("is a WebP with a damaged header")
            width, height = struct.unpack_from("<HH", data, body + 6)
            picture = (width & 0x3FFF, height & 0x3FFF)
        elif kind == b"VP8L" and picture is None:
            signature, bits = struct.unpack_from("<BI", data, body)
            if signature != 0x2F:
                raise ValueError("is a WebP with a damaged header")
            picture = (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        elif kind == b"EXIF":
            exif = data[body : body + length]
            orientation = _exif_orientation(exif.removeprefix(b"Exif\0\0"))
        at = body + length + (length & 1)
    if picture is None or canvas not in (None, picture):
        raise ValueError("is a WebP with a damaged header")
    return Header("WebP", *picture, orientation)


def _uint24(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")
