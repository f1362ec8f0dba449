"""Encoded pictures to upright uint8 RGB, with every limit checked before a pixel is decoded."""

from __future__ import annotations

import base64
import os
import re

import cv2
import numpy as np

from tessera.errors import InvalidRequest
from tessera.preprocess.headers import Header, image_format, plain_png, read_header
from tessera.preprocess.settings import Limits

# A progressive JPEG redraws the picture in every scan; a hostile one has thousands.
FULL_SIZE_PASSES = 16
URL = re.compile(rb"(?i)(https?|file|[a-z][a-z0-9+.-]{1,15}(?=://)):")
# How JPEG, PNG and WebP begin in base64.
BASE64_MAGIC = (b"/9j/", b"iVBORw0KGgo", b"UklGR")
FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
# A JPEG decoder can leave out high frequencies: as many pixels less a side, for a part of the time.
# Without the bit for BGR, which OpenCV 5 refuses beside the one for RGB.
REDUCED = {
    8: cv2.IMREAD_REDUCED_COLOR_8 & ~cv2.IMREAD_COLOR,
    4: cv2.IMREAD_REDUCED_COLOR_4 & ~cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2 & ~cv2.IMREAD_COLOR,
    1: 0,
}


def encoded_bytes(image: bytes | str, name: str = "image") -> bytes:
    """JPEG, PNG or WebP bytes from themselves, from base64 text or from a data: URL.

    Raises InvalidRequest that calls the picture ``name``; also for http, https, file and other URLs.
    """
    data = image.encode("utf-8", "replace") if isinstance(image, str) else bytes(image)
    if not data:
        raise InvalidRequest(f"{name} is empty (0 bytes)")
    if image_format(data):
        return data
    start = data[:64].lstrip()
    if start[:5].lower() == b"data:":
        head, comma, data = data.lstrip().partition(b",")
        if not comma or not head.lower().endswith(b";base64"):
            raise InvalidRequest(f"{name} is a data: URL without ';base64,'; send data:image/jpeg;base64,...")
    elif match := URL.match(start):
        scheme = match[1].decode()
        raise InvalidRequest(f"{name} is a {scheme}: URL, which is never fetched; send the bytes or a data: URL")
    elif not start.startswith(BASE64_MAGIC):
        # Not a picture in any known form: read_header says what it is, if it knows.
        return data
    try:
        return base64.b64decode(data.translate(None, b" \t\r\n\f\v"), validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{name} is damaged base64 text: {error}") from None


def read_checked_header(data: bytes, limits: Limits, name: str = "image") -> Header:
    """Format, size and orientation, without decoding. Raises InvalidRequest above ``limits.max_pixels``."""
    try:
        header = read_header(data)
    except ValueError as error:
        raise InvalidRequest(f"{name} {error}") from None
    pixels = header.width * header.height
    if pixels > limits.max_pixels:
        raise InvalidRequest(
            f"{name} has {header.width}x{header.height} = {pixels / 1e6:.1f} megapixels; the limit is "
            f"{limits.max_pixels / 1e6:g}. Send it smaller"
        )
    if pixels * header.passes > FULL_SIZE_PASSES * limits.max_pixels:
        raise InvalidRequest(f"{name} is a JPEG of {header.passes} scans; save it as a baseline JPEG")
    return header


def probe_size(data: bytes, limits: Limits = Limits(), name: str = "image") -> tuple[int, int]:
    """(width, height) in pixels after EXIF rotation, from the header alone. Raises InvalidRequest."""
    return read_checked_header(data, limits, name).upright_size


def decode(
    data: bytes, limits: Limits = Limits(), name: str = "image", enough: tuple[int, int] | None = None
) -> np.ndarray:
    """Upright RGB pixels, uint8 [H, W, 3]; raises InvalidRequest.

    As Pillow's ``convert("RGB")`` after ``exif_transpose``: alpha is dropped, palettes, grey and CMYK are converted.
    16-bit samples keep their high byte (Pillow clips 16-bit grey at 255 instead).
    ``enough`` is (width, height) in pixels: a JPEG may come out at 1/2, 1/4 or 1/8 of its size where neither side
    falls below it. Other formats always keep their size.
    """
    header = read_checked_header(data, limits, name)
    try:
        pixels = _decode_jpeg(data, header, enough) if header.format == "JPEG" else _decode_other(data, header)
    except cv2.error:
        pixels = None
    if pixels is None:
        raise InvalidRequest(f"{name} is a damaged or truncated {header.format}; its pixels cannot be decoded")
    return upright(pixels, header.orientation)


def _decode_other(data: bytes, header: Header) -> np.ndarray | None:
    if header.format == "PNG":
        data = plain_png(data)
    pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), FLAGS)
    expected = pixels is not None and pixels.shape == (header.height, header.width, 3) and pixels.dtype == np.uint8
    return pixels if expected else None


def _decode_jpeg(data: bytes, header: Header, enough: tuple[int, int] | None) -> np.ndarray | None:
    """Straight into the result: imdecode copies the picture once more, which takes more time and memory."""
    divisor = _divisor(header.upright_size, enough)
    pixels = np.empty((-(-header.height // divisor), -(-header.width // divisor), 3), dtype=np.uint8)
    # imread does not say when it gives up. Rows are written from the top, so the last one tells: it must lose its mark.
    mark = np.frombuffer(os.urandom(pixels[-1].size), dtype=np.uint8).reshape(pixels[-1].shape)
    pixels[-1] = mark
    with open(os.memfd_create("picture"), "wb") as file:
        file.write(data)
        file.flush()
        cv2.imread(f"/proc/self/fd/{file.fileno()}", pixels, FLAGS | REDUCED[divisor])
    return None if np.array_equal(pixels[-1], mark) else pixels


def _divisor(size: tuple[int, int], enough: tuple[int, int] | None) -> int:
    """The largest of REDUCED that leaves ``enough`` pixels on both sides."""
    if enough is None:
        return 1
    return next((d for d in REDUCED if all(side >= d * least for side, least in zip(size, enough))), 1)


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation (1..8) on [H, W, C]."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    # A copy: a flipped axis of one pixel counts as contiguous and keeps its negative stride, which torch refuses.
    return pixels if orientation == 1 else pixels.copy()
