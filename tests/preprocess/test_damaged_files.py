"""Damaged files against Pillow: what it refuses is not answered, and of JPEGs and WebPs what it opens is."""

import io
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import encoded_pictures as pictures
import numpy as np
import pytest
from faults import mutations
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tessera.errors import InvalidRequest
from tessera.preprocess.decode import Limits, decode, encoded_bytes

CORPUS = pictures.corpus() | {
    f"{kind} large": pictures.saved(Image.fromarray(pictures.smooth(320, 240)), kind, **options)
    for kind, options in {"JPEG": {"quality": 90}, "WEBP": {"lossless": True}, "PNG": {}}.items()
}
LIMITS = Limits(max_file_pixels=4_000_000)
PER_FILE = 40
JPEG = CORPUS["jpeg"]


def by_pillow(data: bytes) -> np.ndarray | None:
    """Its pixels, unturned where it does not understand the EXIF block; None where it gives up."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP"])
            if image.width * image.height > LIMITS.max_file_pixels:
                return None
            rgb = image.convert("RGB")
            try:
                return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
            except Exception:
                return np.asarray(rgb)
    except Exception:
        return None


def by_us(data: bytes, enough: tuple[int, int] | None = None) -> np.ndarray | None:
    """Its pixels, None for an InvalidRequest; fails on any other error, and where it takes a second of processor
    time."""
    started = time.process_time()
    try:
        encoded = encoded_bytes(data, "image 0")
        width, height = pictures.probe_size(encoded, LIMITS, "image 0")
        pixels = decode(encoded, LIMITS, "image 0", enough)
        assert pixels.dtype == np.uint8 and (enough or pixels.shape == (height, width, 3))
    except InvalidRequest as error:
        assert str(error).startswith("image 0 ")
        assert ".py" not in str(error) and str(Path(__file__).parents[2]) not in str(error)
        pixels = None
    assert time.process_time() - started < 1
    return pixels


def mutants(name: str) -> Iterator[bytes]:
    """Damaged parts, headers, EXIF blocks and splices; and up to four bytes changed anywhere."""
    dice = np.random.default_rng(sum(name.encode()))
    donors = list(CORPUS.values())
    for number in range(PER_FILE):
        if number % 2:
            yield mutations.picture(dice, CORPUS[name], donors[dice.integers(len(donors))])
            continue
        data = bytearray(CORPUS[name])
        for _ in range(dice.choice([1, 1, 2, 4])):
            data[dice.integers(len(data))] = dice.integers(256)
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(CORPUS))
def test_as_pillow(name: str) -> None:
    both = 0
    for number, data in enumerate(mutants(name)):
        if name.startswith("jpeg"):
            by_us(data, enough=(11, 7))
        expected, found = by_pillow(data), by_us(data)
        if expected is None and "animated" in name and found is not None:  # frames behind the one that counts
            assert np.array_equal(found, by_pillow(CORPUS[name]))
            continue
        assert found is None or expected is not None, f"mutant {number} is answered though Pillow refuses it"
        if found is None:
            # Stricter than Pillow: checksums and the end of a PNG, the polarity of CMYK, the end of a JPEG.
            kept = "png" in name.lower() or "cmyk" in name or b"\xff\xd9" not in data[-4000:]
            assert expected is None or kept, f"mutant {number} is refused though Pillow opens it"
            continue
        both += 1
        assert found.shape == expected.shape
        assert np.abs(found - expected.astype(int)).max() <= (2 if "cmyk" in name else 0), f"mutant {number}"
    assert both


def segment(marker: int, body: bytes, stated: int) -> bytes:
    return bytes([0xFF, marker]) + stated.to_bytes(2, "big") + body


@pytest.mark.parametrize("stated", [0, 1, 2, 30, 45, 60])
@pytest.mark.parametrize("marker", [0xE1, 0xE2, 0xED, 0xEF, 0xFE])
def test_a_jpeg_whose_app_segment_states_a_wrong_length(marker: int, stated: int) -> None:
    """43 bytes follow, 45 with the length: decoders pass over what is left of it, or over the next segment."""
    data = JPEG[:2] + segment(marker, bytes(range(1, 44)), stated) + JPEG[2:]
    assert np.array_equal(decode(data), by_pillow(data))
    assert np.array_equal(decode(data), decode(JPEG))


@pytest.mark.parametrize("enough", [None, (20, 14)])
def test_a_jpeg_with_a_damaged_scan_is_pillows_repair_or_refused(enough: tuple[int, int] | None) -> None:
    scan = JPEG.index(b"\xff\xda") + 14
    repaired = JPEG[: scan + 200] + JPEG[scan + 230 :]
    expected = by_pillow(repaired)
    found = decode(repaired, enough=enough)
    if enough is None:
        assert np.array_equal(found, expected)
    else:
        with Image.open(io.BytesIO(repaired)) as image:
            image.draft(None, (90 // 4, 60 // 4))
            assert np.array_equal(found, np.asarray(image.convert("RGB")))
    given_up = JPEG[: scan + 200] + b"\xff\x12" + JPEG[scan + 200 :]
    assert by_pillow(given_up) is None
    with pytest.raises(InvalidRequest, match="damaged or truncated JPEG"):
        decode(given_up, enough=enough)


def test_a_decoder_that_finds_another_size_than_was_checked_is_not_followed() -> None:
    """A second frame header, which libjpeg refuses, must not widen what is decoded."""
    frame = JPEG.index(b"\xff\xc0")
    with pytest.raises(InvalidRequest):
        decode(JPEG[:frame] + pictures.with_jpeg_size(JPEG, 4000, 4000)[frame : frame + 19] + JPEG[frame:])


@settings(max_examples=200)
@given(st.sampled_from(list(CORPUS.values())), st.floats(0, 1))
def test_files_cut_anywhere(data: bytes, share: float) -> None:
    cut = data[: int(len(data) * share)]
    assert (by_us(cut) is None) == (cut != data)


@settings(max_examples=200)
@given(
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x20\0\0\0WEBP", b"data:"]),
    st.binary(max_size=80),
)
def test_any_bytes(start: bytes, rest: bytes) -> None:
    by_us(start + rest)
