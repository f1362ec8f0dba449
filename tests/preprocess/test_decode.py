"""Decoding against Pillow, sizes from headers, and what bad bytes are answered with."""

from __future__ import annotations

import base64
import io

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image, ImageOps

from tessera.errors import InvalidRequest
from tessera.preprocess.decode import Limits, decode, encoded_bytes, probe_size

CORPUS = pictures.corpus()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("kind", list(CORPUS))
def test_pixels_and_sizes_as_pillow(kind: str) -> None:
    expected = by_pillow(CORPUS[kind]).astype(int)
    found = decode(CORPUS[kind])
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert found.shape == expected.shape
    assert probe_size(CORPUS[kind]) == (expected.shape[1], expected.shape[0])
    # CMYK is converted in another fixed-point arithmetic; all else is the same library's output.
    assert np.abs(found - expected).max() <= (1 if "cmyk" in kind else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientations(kind: str, orientation: int) -> None:
    image = Image.fromarray(pictures.smooth(48, 32))
    data = pictures.saved(image, kind, exif=pictures.exif(orientation))
    expected = by_pillow(data)
    assert probe_size(data) == ((32, 48) if orientation >= 5 else (48, 32))
    assert np.array_equal(decode(data), expected)


def test_16_bit_grey_keeps_the_high_byte() -> None:
    grey = pictures.smooth(40, 30, 1)[..., 0]
    found = decode(pictures.sixteen_bit_png(grey.astype(np.uint16) * 256 + 200))
    assert np.array_equal(found, np.repeat(grey[..., None], 3, axis=2))


def test_base64_text_and_data_urls() -> None:
    for kind in ("jpeg", "png", "webp"):
        data = CORPUS[kind]
        text = base64.b64encode(data)
        for form in (data, text, text.decode(), base64.encodebytes(data), b"data:image/x;base64," + text):
            assert encoded_bytes(form) == data


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"http://example.com/a.jpg", "http: URL"),
        (b"HTTPS://example.com/a.jpg", "HTTPS: URL"),
        ("file:///etc/passwd", "file: URL"),
        ("s3://bucket/a.jpg", "s3: URL"),
        (b"data:image/jpeg,abc", ";base64,"),
        (b"data:image/jpeg;base64,@@@", "damaged base64"),
        (b"/9j/4AAQ" + b"A", "damaged base64"),
    ],
)
def test_wrong_forms_of_images(data: bytes | str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"image 3.*{word}"):
        encoded_bytes(data, "image 3")


JPEG, PNG, WEBP = CORPUS["jpeg"], CORPUS["png"], CORPUS["webp"]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"hello, I am not a picture", "not a JPEG, PNG or WebP"),
        (b"GIF89a" + bytes(20), "GIF"),
        (b"BM" + bytes(20), "BMP"),
        (b"\0\0\0\x1cftypheic" + bytes(20), "HEIC"),
        (JPEG[: len(JPEG) // 2], "truncated JPEG"),
        (JPEG[:-2], "truncated JPEG"),
        (JPEG[:30], "inside its header"),
        (PNG[: len(PNG) // 2], "truncated PNG"),
        (PNG[:-4], "truncated PNG"),
        (WEBP[: len(WEBP) // 2], "truncated WebP"),
        (WEBP[:14], "truncated WebP"),
        (pictures.png_of_size(0, 10), "0x10"),
        (pictures.with_jpeg_size(JPEG, 0, 64), "0x64"),
        (pictures.png_of_size(300, 200), "damaged or truncated PNG"),
        (CORPUS["jpeg cmyk"].replace(b"Adobe", b"Xdobe"), "CMYK JPEG without an Adobe marker"),
        (pictures.animated_webp(), "animated"),
    ],
)
def test_bad_bytes(data: bytes, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"image 2.*{word}"):
        decode(data, name="image 2")


@pytest.mark.parametrize("data", [pictures.png_of_size(60_000, 60_000), pictures.with_jpeg_size(JPEG, 65_000, 65_000)])
def test_decompression_bombs_are_refused_before_decoding(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cv2.imdecode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match=r"megapixels; the limit is 50"):
        decode(data)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    data = CORPUS["jpeg progressive"]
    scan = data[data.rfind(b"\xff\xda") : -2]
    bomb = pictures.with_jpeg_size(data[:-2] + scan * 100 + data[-2:], 5000, 4000)
    with pytest.raises(InvalidRequest, match="scans"):
        probe_size(bomb)


def test_limits_are_configurable() -> None:
    with pytest.raises(InvalidRequest, match="90x60"):
        decode(JPEG, Limits(max_pixels=5000))
