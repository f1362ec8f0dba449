"""Pictures decoded and cut on the GPU against the CPU's tiles (`make test-gpu`)."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from tessera.errors import InvalidRequest
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest, PreprocessSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.gpu_pictures import GpuPictures
from tessera.vision.pictures import VisionItem, pictures_of
from tessera.vision.settings import VisionSettings

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
SIDE = 448

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def page(width: int, height: int, **options: Any) -> bytes:
    """A JPEG of coloured letters on a colour field."""
    dice = np.random.default_rng((width, height))
    coarse = dice.integers(128, 256, (height // 64 + 2, width // 64 + 2, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    for y in range(16, height, 24):
        for x in range(2, width, 120):
            colour = dice.integers(0, 256, 3).tolist()
            cv2.putText(image, f"{dice.integers(1 << 24):x}", (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, 1)
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", **{"quality": 90, **options})
    return stream.getvalue()


def rotated(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


@pytest.fixture(scope="module")
def ways() -> tuple[Preprocessor, Preprocessor]:
    """Pixels from the CPU, and everything that can be left to the GPU."""
    here, there = (PreprocessSettings(gpu_pixels=pixels) for pixels in (0, 1))
    return Preprocessor.from_checkpoint(CHECKPOINT, here), Preprocessor.from_checkpoint(CHECKPOINT, there)


@pytest.fixture(scope="module")
def decoder() -> GpuPictures:
    return GpuPictures("cuda")


def item(preprocessor: Preprocessor, *images: bytes) -> VisionItem:
    found = preprocessor(PreprocessRequest(text="What is this?", images=images))
    return VisionItem(found.pixels, found.plan, found.digest)


def assert_near(ways: tuple[Preprocessor, Preprocessor], decoder: GpuPictures, jpeg: bytes) -> None:
    (cut,), (encoded,) = (pictures_of(item(way, jpeg), SIDE, encoded=True) for way in ways)
    assert encoded.readable(decoder), encoded.error
    assert encoded.tiles.is_cuda and encoded.tiles.dtype == torch.uint8
    difference = np.abs(encoded.tiles.cpu().numpy().astype(int) - cut.tiles)
    assert difference.mean() <= 1 and np.quantile(difference, 0.999) <= 8


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(448, 448), (1280, 720), (1919, 1081), (3840, 2160), (97, 1301)])
def test_grey_levels_are_the_cpus(ways, decoder, size, subsampling) -> None:
    assert_near(ways, decoder, page(*size, subsampling=subsampling))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_pictures(ways, decoder, orientation) -> None:
    assert_near(ways, decoder, page(800, 430, exif=rotated(orientation)))


@pytest.mark.parametrize("options", [{"quality": 20}, {"quality": 100}, {"optimize": True}, {"restart_marker_rows": 1}])
def test_ways_to_write_a_jpeg(ways, decoder, options) -> None:
    assert_near(ways, decoder, page(1000, 700, **options))


def test_the_longest_pictures_that_come(ways, decoder) -> None:
    assert_near(ways, decoder, page(16384, 64))
    assert_near(ways, decoder, page(64, 16384))


def test_memory_stays_below_what_was_announced(ways, decoder) -> None:
    assert_near(ways, decoder, page(640, 480))  # cuBLAS has its workspace from here on
    for size in ((1919, 1081), (3840, 2160), (7680, 4320), (16384, 448), (448, 448)):
        for subsampling in (0, 2):
            for orientation in (1, 6):
                jpeg = page(*size, subsampling=subsampling, exif=rotated(orientation))
                (picture,) = pictures_of(item(ways[1], jpeg), SIDE, encoded=True)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                assert picture.readable(decoder)
                taken = torch.cuda.max_memory_allocated() - before
                assert taken <= picture.encoded.peak_bytes, (size, subsampling, orientation)


def damaged(jpeg: bytes) -> list[bytes]:
    """Files that preprocess lets pass: their headers are whole."""
    dice = np.random.default_rng(3)
    scan = jpeg.index(b"\xff\xda") + 14
    garbage = bytearray(jpeg)
    garbage[scan + 100 : scan + 3000] = dice.integers(0, 255, 2900, dtype=np.uint8).tobytes()
    tables = bytearray(jpeg)
    tables[jpeg.index(b"\xff\xc4") + 5 : jpeg.index(b"\xff\xc4") + 21] = b"\xff" * 16
    return [jpeg[: scan + 500] + b"\xff\xd9", jpeg[:scan] + b"\xff\xd9", bytes(garbage), bytes(tables)]


def test_damaged_files_are_refused_or_decoded_and_never_more(ways, decoder) -> None:
    """As with libjpeg a damaged scan may pass; the next picture must come out right after each."""
    good = page(1000, 700)
    for file in damaged(good):
        try:
            broken = item(ways[1], file)
        except InvalidRequest:
            continue
        (picture,) = pictures_of(broken, SIDE, encoded=True)
        if not picture.readable(decoder):
            assert "cannot be decoded" in str(picture.error)
        torch.cuda.synchronize()
        assert_near(ways, decoder, good)


def test_a_frame_that_states_another_size_is_refused(ways, decoder) -> None:
    (picture,) = pictures_of(item(ways[1], page(640, 480)), SIDE, encoded=True)
    picture.encoded = replace(picture.encoded, picture=replace(picture.encoded.picture, width=639))
    assert not picture.readable(decoder)
    assert "639x480" in str(picture.error)


def test_pictures_in_a_row_do_not_mix_while_the_gpu_is_busy(ways, decoder) -> None:
    pictures = [pictures_of(item(ways[1], page(900 + 40 * number, 700)), SIDE, encoded=True)[0] for number in range(8)]
    alone = []
    for picture in pictures:
        alone.append(decoder.tiles(picture.encoded).clone())
        torch.cuda.synchronize()
    work = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):  # the decoded planes wait behind this
        work = work @ work
    together = [decoder.tiles(picture.encoded) for picture in pictures]
    for one, other in zip(alone, together):
        assert torch.equal(one, other)


def test_through_the_encoder_with_its_cache(ways) -> None:
    settings = VisionSettings(runner="torch", device="cuda", picture_decoder="nvjpeg", infer_batch_size=5)
    encoder = VisionEncoder.from_checkpoint(CHECKPOINT, settings)
    first, second = page(1000, 700), page(1300, 900)
    expected = encoder.encode([item(ways[0], first, second)])[0]
    found = encoder.encode([item(ways[1], first), item(ways[0], second), item(ways[1], second)])
    rows = torch.cat([found[0], found[2]])
    assert torch.nn.functional.cosine_similarity(rows.float(), expected.float(), dim=1).min() > 0.98


def test_cached_pictures_are_not_decoded(ways) -> None:
    settings = VisionSettings(runner="torch", device="cuda", picture_decoder="nvjpeg")
    encoder = VisionEncoder.from_checkpoint(CHECKPOINT, settings)
    asked = item(ways[1], page(1000, 700))
    (first,) = encoder.encode([asked])

    class Never:
        def tiles(self, cut: Any) -> torch.Tensor:
            raise AssertionError("decoded again")

    encoder.decoder = Never()
    assert torch.equal(encoder.encode([asked])[0], first)
