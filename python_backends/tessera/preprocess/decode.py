"""Encoded pictures to upright uint8 RGB, with every limit checked before a pixel is decoded.

Resize modes: Pillow's antialiased bicubic at several times its speed, and a faster one that is only like it.
"""

import base64
import io
import re
import struct

import cv2
import numpy as np
from simplejpeg import decode_jpeg

from tessera.errors import InvalidRequest
from tessera.preprocess.headers import Header, image_format, plain_png, plain_webp, read_header
from tessera.settings.stages import Limits

# A progressive JPEG redraws the picture in every scan; a hostile one has thousands.
FULL_SIZE_PASSES = 16
URL = re.compile(rb"(?i)(https?|file|[a-z][a-z0-9+.-]{1,15}(?=://)):")
# How JPEG, PNG and WebP begin in base64.
BASE64_MAGIC = (b"/9j/", b"iVBORw0KGgo", b"UklGR")
FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
GREY_16_FLAGS = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
# A JPEG decoder can leave out high frequencies: as many pixels less a side, for a part of the time.
DIVISORS = (8, 4, 2)
GREY_16 = b"\x10\x00"  # in a PNG's IHDR: bits a sample, colour type
UNSCALED_GREY = 4096  # 16-bit grey in which no sample reaches this is of fewer bits, or very dark


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
    """Format, size and orientation, without decoding. Raises InvalidRequest above ``limits.max_file_pixels``."""
    try:
        header = read_header(data)
    except ValueError as error:
        raise InvalidRequest(f"{name} {error}") from None
    pixels = header.width * header.height
    if pixels > limits.max_file_pixels:
        raise InvalidRequest(
            f"{name} has {header.width}x{header.height} = {pixels / 1e6:.1f} megapixels; the limit is "
            f"{limits.max_file_pixels / 1e6:g}. Send it smaller"
        )
    if pixels * header.passes > FULL_SIZE_PASSES * limits.max_file_pixels:
        raise InvalidRequest(f"{name} is a JPEG of {header.passes} scans; save it as a baseline JPEG")
    return header


def decode(
    data: bytes, limits: Limits = Limits(), name: str = "image", enough: tuple[int, int] | None = None
) -> np.ndarray:
    """Upright RGB pixels, uint8 [H, W, 3]; raises InvalidRequest.

    As Pillow's ``convert("RGB")`` after ``exif_transpose``: alpha is dropped, palettes, grey and CMYK are converted.
    16-bit samples keep their high byte; 16-bit grey that holds no more than 8 bits keeps its low one, and is refused
    where neither is sure (Pillow clips all 16-bit grey at 255). A damaged JPEG is answered where Pillow answers it.
    ``enough`` is (width, height) in pixels: a JPEG may come out at 1/2, 1/4 or 1/8 of its size where neither side
    falls below it. Other formats always keep their size.
    """
    header = read_checked_header(data, limits, name)
    pixels = _decode_jpeg(data, header, enough) if header.format == "JPEG" else _decode_other(data, header, name)
    if pixels is None:
        raise InvalidRequest(f"{name} is a damaged or truncated {header.format}; its pixels cannot be decoded")
    return upright(pixels, header.orientation)


def _decode_other(data: bytes, header: Header, name: str) -> np.ndarray | None:
    grey_16 = header.format == "PNG" and data[24:26] == GREY_16
    try:
        plain = np.frombuffer(plain_png(data) if header.format == "PNG" else plain_webp(data), dtype=np.uint8)
        pixels = cv2.imdecode(plain, GREY_16_FLAGS if grey_16 else FLAGS)
    except (cv2.error, struct.error):
        return None
    if pixels is None or pixels.shape[:2] != (header.height, header.width):
        return None
    return _rgb_of_grey_16(pixels, name) if grey_16 else pixels


def _rgb_of_grey_16(grey: np.ndarray, name: str) -> np.ndarray:
    """uint16 [H, W] as uint8 RGB: samples that fit 8 bits as they are, the high byte of those that fill 16."""
    largest = int(grey.max())
    if 256 <= largest < UNSCALED_GREY:
        raise InvalidRequest(
            f"{name} is 16-bit grey whose largest sample is {largest}: whether that is dark, or white in fewer bits, "
            "cannot be told; save it with 8 bits, or scaled to all 16"
        )
    return cv2.cvtColor((grey if largest < 256 else grey >> 8).astype(np.uint8), cv2.COLOR_GRAY2RGB)


def _decode_jpeg(data: bytes, header: Header, enough: tuple[int, int] | None) -> np.ndarray | None:
    divisor = _divisor(header.upright_size, enough)
    height, width = -(-header.height // divisor), -(-header.width // divisor)
    # The size that was checked, whatever the decoder finds in the file: a larger picture does not fit.
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    try:
        found = decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=pixels, strict=True)
    except ValueError:
        found = _decode_damaged_jpeg(data, header, divisor)
    return found if found is not None and found.shape == pixels.shape else None


def _decode_damaged_jpeg(data: bytes, header: Header, divisor: int) -> np.ndarray | None:
    """What Pillow makes of a file that libjpeg warns of or gives up; None where Pillow gives up too.

    libjpeg repairs much, and only Pillow, which costs twice the time, tells what it repaired from what it gave up.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            if image.size != (header.width, header.height):  # not the size that was checked
                return None
            image.draft(None, (header.width // divisor, header.height // divisor))
            return np.array(image.convert("RGB"))
    except Exception:  # damaged files make it raise all sorts
        return None


def _divisor(size: tuple[int, int], enough: tuple[int, int] | None) -> int:
    """The largest of DIVISORS that leaves ``enough`` pixels on both sides, or 1."""
    if enough is None:
        return 1
    return next((d for d in DIVISORS if all(side >= d * least for side, least in zip(size, enough))), 1)


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


def use_one_thread(name: str) -> None:
    """One thread for everything that the mode needs in this process; also loads it. Processes scale to the cores."""
    cv2.setNumThreads(1)
    if name == "reference":
        import torch

        torch.set_num_threads(1)


def resize_reference(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Equals Pillow's BICUBIC but for the rounding of its weights.

    That is: a = -0.5, antialiased, two passes with a uint8 picture between them. The order of the passes shows where
    the first one clips. It is Pillow 13's: vertical first where the height shrinks by more than twice what the width
    does (older Pillow: horizontal first, always).
    """
    rows, columns = image.shape[:2]
    if height < rows and rows - height > 2 * (columns - width):
        image = _bicubic(image, columns, height)
    return _bicubic(image, width, height)


def _bicubic(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """torch's own order: horizontal first. Channels-last in and out, its fast path: no transposition, no copy.

    The batch axis comes before the permutation: added after it, its stride hides the layout from torch.
    """
    if image.shape[:2] == (height, width):
        return image
    # Here, since it takes 190 MB of memory that no other mode needs.
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2)
    resized = interpolate(pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0).contiguous().numpy()


def resize_fast(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Halve each side while it is at least twice too long, then OpenCV's bicubic (a = -0.75) to the size.

    Halving, the mean of two pixels, is all the antialiasing. Linear interpolation at a factor of exactly two is that
    mean; OpenCV's area mode gives the same but is quick for both sides at once only, and at factors that are not whole
    it takes longer than ``resize_reference``.
    """
    while image.shape[0] >= 2 * height or image.shape[1] >= 2 * width:
        down, across = (0.5 if side >= 2 * target else 1 for side, target in zip(image.shape, (height, width)))
        image = cv2.resize(image, None, fx=across, fy=down, interpolation=cv2.INTER_LINEAR)
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC)


RESIZE_MODES = {"reference": resize_reference, "fast": resize_fast}
"""(image, width, height): uint8 [H, W, 3] to uint8 [height, width, 3], maybe the image itself."""
