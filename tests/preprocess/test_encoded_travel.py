"""Which pictures are left to the vision stage's GPU, and how they travel there."""

from pathlib import Path
from typing import Any

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

from tessera.errors import InvalidRequest
from tessera.models.family import EncodedPicture
from tessera.preprocess.headers import read_header
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest, PreprocessSettings

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"


def ask(gpu_pixels: int, *images: bytes, **settings: Any) -> Prepared:
    stage = Preprocessor.from_checkpoint(CHECKPOINT, PreprocessSettings(gpu_pixels=gpu_pixels, **settings))
    return stage(PreprocessRequest(text="What is this?", images=images))


def marked(jpeg: bytes, before: int, value: bytes) -> bytes:
    """With a segment put in behind the first marker."""
    return jpeg[:2] + bytes([0xFF, before]) + (len(value) + 2).to_bytes(2, "big") + value + jpeg[2:]


ROOM = Image.fromarray(pictures.smooth(96, 64))
ADOBE = b"Adobe\0\x64\0\0\0\0"
BARE = pictures.saved(ROOM, "JPEG")
BARE = BARE[:2] + BARE[20:]  # without the JFIF segment of 18 bytes


@pytest.mark.parametrize(
    ("data", "step"),
    [
        (pictures.saved(ROOM, "JPEG", subsampling=0), (1, 1)),
        (pictures.saved(ROOM, "JPEG", subsampling=1), (2, 1)),
        (pictures.saved(ROOM, "JPEG", subsampling=2), (2, 2)),
        (pictures.saved(ROOM, "JPEG", subsampling=2, exif=pictures.exif(6)), (2, 2)),
        (pictures.saved(ROOM, "JPEG") + b"mark", (2, 2)),
        (BARE, (2, 2)),
        (marked(BARE, 0xEE, ADOBE + b"\1"), (2, 2)),
        (marked(BARE, 0xEE, ADOBE + b"\0"), None),  # RGB
        (BARE.replace(b"\1\x22\0\2\x11\1\3\x11\1", b"R\x22\0G\x11\1B\x11\1"), None),  # components named RGB
        (BARE.replace(b"\1\x22\0", b"\1\x12\0"), None),  # 4:4:0
        (BARE.replace(b"\1\x22\0", b"\1\x41\0"), None),  # 4:1:1
        (pictures.saved(ROOM, "JPEG", progressive=True), None),
        (pictures.saved(ROOM.convert("L"), "JPEG"), None),
        (pictures.saved(ROOM.convert("CMYK"), "JPEG"), None),
        (pictures.saved(ROOM, "PNG"), None),
        (pictures.saved(ROOM, "WEBP"), None),
    ],
)
def test_what_the_header_says_of_the_chroma(data: bytes, step: tuple[int, int] | None) -> None:
    assert read_header(data).chroma_step == step


def test_large_jpegs_travel_as_they_came() -> None:
    small, large = pictures.jpeg(100, 100), pictures.jpeg(1000, 480, exif=pictures.exif(6))
    found = ask(480_000, small, large)
    assert found.plan.tolist() == [0, 1, 1, 1, 1, 3, 2, 1]
    tiles = 448 * 448 * 3
    picture, end = EncodedPicture.read(found.pixels, tiles, "picture 1")
    assert end == found.pixels.size
    assert picture.data.tobytes() == large
    assert (picture.width, picture.height, picture.orientation) == (1000, 480, 6)
    assert found.spans[:, 1].tolist() == [64, 3 * 64]


@pytest.mark.parametrize(
    ("gpu_pixels", "data"),
    [
        (0, pictures.jpeg(640, 480)),
        (640 * 480 + 1, pictures.jpeg(640, 480)),
        (1, pictures.saved(ROOM, "PNG")),
        (1, pictures.jpeg(640, 480, progressive=True)),
        (1, pictures.jpeg(16385, 16)),
    ],
)
def test_all_others_are_decoded_here(gpu_pixels: int, data: bytes) -> None:
    found, usual = ask(gpu_pixels, data), ask(0, data)
    assert np.array_equal(found.pixels, usual.pixels)
    assert np.array_equal(found.plan, usual.plan)
    assert np.array_equal(found.digest, usual.digest)


def test_grey_levels_of_the_two_ways_never_share_a_name() -> None:
    data = pictures.jpeg(640, 480)
    assert not np.array_equal(ask(1, data).digest, ask(0, data).digest)


def test_limits_hold_before_a_picture_travels() -> None:
    whole = pictures.jpeg(640, 480)
    with pytest.raises(InvalidRequest, match="image 0 is a truncated JPEG"):
        ask(1, whole[:-300])
    with pytest.raises(InvalidRequest, match="megapixels; the limit is 50"):
        ask(1, whole.replace((480).to_bytes(2, "big") + (640).to_bytes(2, "big"), b"\xff\xff\xff\xff"))
