"""Decoding against Pillow, sizes from headers, and what bad bytes are answered with."""

import base64
import io
import struct
import zlib

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

from tessera.errors import InvalidRequest
from tessera.preprocess.decode import decode, encoded_bytes, upright

CORPUS = pictures.corpus()


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("kind", list(CORPUS))
def test_pixels_and_sizes_as_pillow(kind: str) -> None:
    expected = pictures.by_pillow(CORPUS[kind]).astype(int)
    found = decode(CORPUS[kind])
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert found.shape == expected.shape
    assert pictures.probe_size(CORPUS[kind]) == (expected.shape[1], expected.shape[0])
    # CMYK is converted in another fixed-point arithmetic; all else is the same library's output.
    assert np.abs(found - expected).max() <= (1 if "cmyk" in kind else 0)


@pytest.mark.parametrize(("enough", "divisor"), [((49, 10), 1), ((48, 32), 2), ((24, 16), 4), ((12, 8), 8)])
@pytest.mark.parametrize("orientation", [1, 2, 3, 6, 7])
def test_a_jpeg_alone_is_decoded_small_where_few_pixels_are_enough(
    orientation: int, enough: tuple[int, int], divisor: int
) -> None:
    """97 x 65: no side is a multiple of the divisor."""
    image = Image.fromarray(pictures.smooth(160, 160)[40:105, 40:137])
    if orientation >= 5:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    data = pictures.saved(image, "JPEG", quality=95, exif=pictures.exif(orientation))
    found = decode(data, enough=enough)
    assert found.shape == (-(-65 // divisor), -(-97 // divisor), 3) and found.flags.c_contiguous
    assert found.shape[1] >= enough[0] and found.shape[0] >= enough[1]
    stored = Image.open(io.BytesIO(data)).convert("RGB")
    expected = upright(np.asarray(stored.reduce(divisor)), orientation).astype(int)
    assert np.abs(found - expected).mean() <= 2  # a picture upside down or in BGR is 40 and more away
    other = pictures.saved(image, "PNG")
    assert np.array_equal(decode(other, enough=enough), decode(other))


@pytest.mark.parametrize(("factor", "offset", "shift"), [(256, 200, 8), (16, 4096, 8), (1, 0, 0)])
def test_16_bit_grey_of_16_and_of_8_bits(factor: int, offset: int, shift: int) -> None:
    """Full samples keep the high byte; samples that fit 8 bits are no blacker than Pillow has them."""
    grey = pictures.smooth(40, 30, 1)[..., 0].astype(np.uint16) * factor + offset
    data = pictures.sixteen_bit_png(grey)
    found = decode(data)
    assert np.array_equal(found, np.repeat((grey >> shift)[..., None], 3, axis=2))
    if not shift:
        assert np.array_equal(found, pictures.by_pillow(data))


@pytest.mark.parametrize("largest", [256, 1023, 4095])
def test_16_bit_grey_of_fewer_bits_is_refused(largest: int) -> None:
    grey = np.full((30, 40), largest, np.uint16)
    grey[:10] = 7
    with pytest.raises(InvalidRequest, match=f"image is 16-bit grey whose largest sample is {largest}:"):
        decode(pictures.sixteen_bit_png(grey))


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
        (JPEG[:30], "JPEG whose header cannot be read"),
        (PNG[: len(PNG) // 2], "truncated PNG"),
        (PNG[:-4], "truncated PNG"),
        (WEBP[: len(WEBP) // 2], "truncated WebP"),
        (WEBP[:14], "truncated WebP"),
        (pictures.png_of_size(0, 10), "PNG whose header cannot be read"),
        (pictures.with_jpeg_size(JPEG, 0, 64), "JPEG whose header cannot be read"),
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
    monkeypatch.setattr("tessera.preprocess.decode.decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match=r"megapixels; the limit is 50"):
        decode(data)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    data = CORPUS["jpeg progressive"]
    scan = data[data.rfind(b"\xff\xda") : -2]
    bomb = pictures.with_jpeg_size(data[:-2] + scan * 100 + data[-2:], 5000, 4000)
    with pytest.raises(InvalidRequest, match="scans"):
        pictures.probe_size(bomb)


@pytest.mark.parametrize("segment", [b"\xff\xe1\xff\xffExif\0\0" + bytes(65527), b"\xff\xfe\0\2", b"\xff"])
def test_a_jpeg_whose_header_never_ends_is_refused(segment: bytes) -> None:
    """Joining its EXIF segments, or walking over the others, would take minutes."""
    with pytest.raises(InvalidRequest, match="too much metadata"):
        pictures.probe_size(JPEG[:2] + segment * ((20 << 20) // len(segment)) + JPEG[2:])


def test_a_png_of_very_many_chunks_is_refused() -> None:
    chunk = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt"))
    with pytest.raises(InvalidRequest, match="more than 50000 chunks"):
        pictures.probe_size(PNG[:33] + chunk * 60_000 + PNG[33:])
