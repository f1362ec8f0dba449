"""Pictures in every encoding that is supported, made with Pillow and OpenCV."""

import io
import struct
import zlib
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

from tessera.preprocess.decode import Limits, read_checked_header


def smooth(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, channels]: colour fields that JPEG keeps well."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 16 + 2, width // 16 + 2, channels), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR).reshape(height, width, channels)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    """Upright RGB, uint8 [H, W, 3]."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def jpeg(width: int = 96, height: int = 64, **options: Any) -> bytes:
    return saved(Image.fromarray(smooth(width, height)), "JPEG", **options)


def probe_size(data: bytes, limits: Limits | None = None, name: str = "image") -> tuple[int, int]:
    return read_checked_header(data, limits or Limits(), name).upright_size


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def sixteen_bit_png(pixels: np.ndarray) -> bytes:
    """uint16 [H, W] or [H, W, 3 or 4 in RGB(A) order]."""
    if pixels.ndim == 3:
        order = [2, 1, 0, 3][: pixels.shape[2]]
        pixels = pixels[..., order]
    return cv2.imencode(".png", pixels)[1].tobytes()


def animated_webp() -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    return saved(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0" * 64)),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def with_jpeg_size(data: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size in its frame header."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def corpus() -> dict[str, bytes]:
    """One small file of each kind."""
    rgba = smooth(90, 60, 4)
    rgb, alpha = Image.fromarray(rgba[..., :3]), Image.fromarray(rgba)
    return {
        "jpeg": saved(rgb, "JPEG", quality=90),
        "jpeg progressive": saved(rgb, "JPEG", progressive=True),
        "jpeg 4:4:4": saved(rgb, "JPEG", subsampling=0),
        "jpeg grey": saved(rgb.convert("L"), "JPEG"),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG", quality=95),
        "jpeg exif": saved(rgb, "JPEG", exif=exif(6)),
        "png": saved(rgb, "PNG"),
        "png alpha": saved(alpha, "PNG"),
        "png grey": saved(rgb.convert("L"), "PNG"),
        "png grey alpha": saved(alpha.convert("LA"), "PNG"),
        "png palette": saved(rgb.convert("P"), "PNG"),
        "png palette transparent": saved(rgb.convert("P"), "PNG", transparency=3),
        "png black and white": saved(rgb.convert("1"), "PNG"),
        "png 16 bit": sixteen_bit_png(rgba[..., :3].astype(np.uint16) * 250 + 77),
        "png exif": saved(rgb, "PNG", exif=exif(8)),
        "png animated": saved(rgb, "PNG", save_all=True, append_images=[rgb.rotate(180)], default_image=True),
        "webp": saved(rgb, "WEBP", quality=80),
        "webp lossless": saved(rgb, "WEBP", lossless=True),
        "webp alpha": saved(alpha, "WEBP", quality=80),
        "webp exif": saved(rgb, "WEBP", exif=exif(3)),
    }
