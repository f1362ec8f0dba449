"""Small pictures of every kind that is accepted, and pictures that were made to do harm."""

import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image
from preprocess.encoded_pictures import exif, png_of_size, saved, sixteen_bit_png, smooth, with_jpeg_size

__all__ = ["png_of_size", "with_jpeg_size"]

SIDE = 40
PNG = b"\x89PNG\r\n\x1a\n"
# first row, first column, row step, column step of Adam7's seven passes
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))


@cache
def seeds() -> dict[str, bytes]:
    """One picture of each kind, 40x40 but for the last."""
    rgba = smooth(SIDE, SIDE, 4)
    rgb, alpha = Image.fromarray(rgba[..., :3]), Image.fromarray(rgba)
    return {
        "jpeg": saved(rgb, "JPEG", quality=85),
        "jpeg progressive": saved(rgb, "JPEG", progressive=True),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG"),
        "jpeg grey": saved(rgb.convert("L"), "JPEG"),
        "jpeg rotated": saved(rgb, "JPEG", exif=exif(6)),
        "png": saved(rgb, "PNG"),
        "png 16 bit": sixteen_bit_png(rgba.astype(np.uint16) * 250 + 77),
        "png palette": saved(rgb.convert("P"), "PNG", transparency=3),
        "png alpha": saved(alpha, "PNG"),
        "png interlaced": interlaced_png(rgba[..., :3]),
        "png rotated": saved(rgb, "PNG", exif=exif(8)),
        "png 16 bit grey of 8": sixteen_bit_png(rgba[..., 0].astype(np.uint16)),
        "webp": saved(rgb, "WEBP", quality=80),
        "webp lossless": saved(rgb, "WEBP", lossless=True),
        "webp alpha": saved(alpha, "WEBP", quality=80),
        "webp rotated": saved(rgb, "WEBP", exif=exif(3)),
        "webp rotated by XMP": saved(rgb, "WEBP", xmp=b'<x tiff:Orientation="6">'),
        "jpeg rotated by XMP": saved(rgb, "JPEG", xmp=b'<x tiff:Orientation="6">'),
        "one pixel wide, rotated": saved(Image.fromarray(rgba[:, :1, :3]), "PNG", exif=exif(3)),
    }


def grey_of_12_bits() -> bytes:
    """A 16-bit grey PNG of a camera that has 12."""
    return sixteen_bit_png(np.linspace(0, 4095, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE))


def interlaced_png(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 3] of at least 5x5, interlaced, unfiltered."""
    height, width = pixels.shape[:2]
    passes = (pixels[row::rows, column::columns] for row, column, rows, columns in ADAM7)
    lines = b"".join(b"\0" + line.tobytes() for reduced in passes for line in reduced)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return PNG + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def riff(chunks: bytes) -> bytes:
    """A WebP file around its chunks."""
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def many_chunks_png(count: int) -> bytes:
    """A PNG with ``count`` empty chunks, 12 bytes each, that mean nothing."""
    good = seeds()["png"]
    return good[:33] + chunk(b"aaAa", b"") * count + good[33:]


def many_chunks_webp(count: int) -> bytes:
    """A WebP with ``count`` empty chunks, 8 bytes each; without VP8X all but the first would be passed over."""
    return riff(seeds()["webp rotated"][12:] + b"JUNK\0\0\0\0" * count)


def largest_webp() -> bytes:
    """A lossless WebP that claims the largest size there is, 16384x16384, and holds almost nothing."""
    picture = b"\x2f" + struct.pack("<I", 16383 | 16383 << 14) + bytes(11)
    return riff(b"VP8L" + struct.pack("<I", len(picture)) + picture)
