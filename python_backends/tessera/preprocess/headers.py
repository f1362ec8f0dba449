"""Sizes and orientation of JPEG, PNG and WebP from their headers: nothing is decoded, nothing is allocated.

Every function raises ValueError with a short reason when the bytes are not what they claim.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n"}
OTHERS = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF"}
# Chunks and header segments are walked one by one, and a hostile file has millions.
MOST_PARTS = 50_000
UNKNOWN = "is not a JPEG, PNG or WebP picture"
PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
WEBP_KEPT = (b"VP8X", b"ALPH", b"VP8 ", b"VP8L")
JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# How a TIFF block writes whole numbers, by their type.
TIFF_INTEGERS = {3: "H", 4: "I", 8: "h", 9: "i"}
LONGEST_TEXT = 1 << 20  # of a PNG's text chunk, decompressed


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
    at, exif, xmp, jfif = 2, bytearray(), b"", False
    adobe: int | None = None  # the colour transform that Adobe's marker states
    frame: tuple[int, int, int, int] | None = None
    frame_at = 0
    for _ in _parts():
        # As libjpeg, which passes over what is no marker: a segment whose length is wrong hides no picture.
        at = data.find(b"\xff", at)
        if at < 0:
            raise IndexError
        marker = data[at + 1]
        if marker == 0xD9:
            raise ValueError("is a JPEG with a damaged header")
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # no marker, a fill byte, or without a length
            at += 1 if marker == 0xFF else 2
            continue
        body = at + 4
        length = max(2, *struct.unpack_from(">H", data, at + 2))
        segment = data[body : at + 2 + length] if marker == 0xE1 else b""
        if segment.startswith(b"Exif\0\0"):
            exif += segment[6:]
        elif segment.startswith(JPEG_XMP):
            xmp = segment
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
    return Header("JPEG", width, height, _orientation(bytes(exif), xmp), int(passes), step)


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


def _orientation(exif: bytes, xmp: bytes) -> int:
    """1..8 as Pillow's exif_transpose has it: EXIF's, else the one in the XMP packet, else 1."""
    stated = _exif_orientation(exif)
    if stated is None and (found := XMP_ORIENTATION.search(xmp)):
        stated = int(found[1])
    return stated if stated and 1 <= stated <= 8 else 1


def _exif_orientation(exif: bytes) -> int | None:
    """Tag 0x0112 of the first directory of a TIFF block, 0 if it is no whole number; None if it is absent."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    stated = None
    if order is None:
        return stated
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for at in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count, value = struct.unpack_from(order + "HHI4s", exif, at)
            if tag == 0x0112:
                form = TIFF_INTEGERS.get(kind) if count == 1 else None
                stated = struct.unpack_from(order + form, value)[0] if form else 0
    except struct.error:
        pass
    return stated


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
    exif, texts, before_pixels = b"", dict[bytes, tuple[bytes, bytes]](), True
    for kind, start, end in chunks:
        before_pixels = before_pixels and kind != b"IDAT"
        # As Pillow; the decoder checks what the pixels are made of.
        if before_pixels and zlib.crc32(data[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
            raise ValueError(f"is a damaged PNG (wrong checksum of chunk {kind.decode('latin-1')!r})")
        if kind == b"eXIf":
            exif = data[start + 8 : end - 4]
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword, _, value = data[start + 8 : end - 4].partition(b"\0")
            texts[keyword] = kind, value
    xmp = _png_text(*texts.get(b"XML:com.adobe.xmp", (b"tEXt", b"")))
    # ImageMagick's older way: a line of its name, one of the length, then hexadecimal digits.
    profile = _png_text(*texts.get(b"Raw profile type exif", (b"tEXt", b""))).split(b"\n")[3:]
    return Header("PNG", width, height, _orientation(exif or _from_hexadecimal(b"".join(profile)), xmp))


def _png_text(kind: bytes, value: bytes) -> bytes:
    """The text of a tEXt, zTXt or iTXt chunk from what follows its keyword; empty if it is damaged."""
    if kind == b"tEXt":
        return value
    try:
        packed, value = (1, value[1:]) if kind == b"zTXt" else (value[0], value[2:].split(b"\0", 2)[2])
        return zlib.decompressobj().decompress(value, LONGEST_TEXT) if packed else value
    except (zlib.error, IndexError):
        return b""


def _from_hexadecimal(digits: bytes) -> bytes:
    try:
        return bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return b""


def _webp_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk, its padding included. Without VP8X only the first counts."""
    end = struct.unpack_from("<I", data, 4)[0] + 8
    if end > len(data):
        raise ValueError("is a truncated WebP; send the whole file")
    chunks: list[tuple[bytes, int, int]] = []
    at = 12
    for _ in _parts():
        if at == end or (chunks and chunks[0][0] != b"VP8X"):
            return chunks
        kind, length = struct.unpack_from("<4sI", data, at)
        start, at = at, at + 8 + length + (length & 1)
        if at > end:
            raise ValueError("is a WebP with a damaged header")
        chunks.append((kind, start, at))
    raise AssertionError("unreachable")


def plain_webp(data: bytes) -> bytes:
    """The same picture without metadata, which a decoder of damaged pixels would read on into."""
    kept = b"".join(data[start:end] for kind, start, end in _webp_chunks(data) if kind in WEBP_KEPT)
    return b"RIFF" + struct.pack("<I", 4 + len(kept)) + b"WEBP" + kept


def _webp(data: bytes) -> Header:
    flags, canvas = 0, None
    pictures: list[tuple[int, int]] = []
    metadata: dict[bytes, bytes] = {}
    for kind, start, end in _webp_chunks(data):
        body = start + 8
        if kind == b"VP8X":
            flags = data[body]
            if flags & 0x02:
                raise ValueError("is an animated WebP; send a still picture")
            canvas = (1 + _uint24(data, body + 4), 1 + _uint24(data, body + 7))
        elif kind == b"VP8 ":
            if data[body + 3 : body + 6] != b"\x9d\x01\x2a":
                raise ValueError("is a WebP with a damaged header")
            width, height = struct.unpack_from("<HH", data, body + 6)
            pictures.append((width & 0x3FFF, height & 0x3FFF))
        elif kind == b"VP8L":
            signature, bits = struct.unpack_from("<BI", data, body)
            if signature != 0x2F:
                raise ValueError("is a WebP with a damaged header")
            pictures.append((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        elif kind == b"ALPH" and pictures:
            raise ValueError("is a WebP with a damaged header")
        elif kind in (b"EXIF", b"XMP "):
            metadata.setdefault(kind, data[body:end])
    if len(pictures) != 1 or canvas not in (None, pictures[0]):
        raise ValueError("is a WebP with a damaged header")
    # Metadata counts where VP8X announces it.
    exif, xmp = (metadata.get(kind, b"") if flags & bit else b"" for kind, bit in ((b"EXIF", 0x08), (b"XMP ", 0x04)))
    return Header("WebP", *pictures[0], _orientation(exif, xmp))


def _uint24(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")
