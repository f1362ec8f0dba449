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
from tessera.settings.stages import VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import GpuDecoder, Picture, VisionItem, bytes_of, pictures_of

pytest.importorskip("nvidia.nvimgcodec", reason="needs nvidia-nvimgcodec-cu13 and nvidia-nvjpeg")

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
CAPACITY = 2 << 30


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
def decoder() -> GpuDecoder:
    return GpuDecoder("cuda", CAPACITY)


def item(preprocessor: Preprocessor, *images: bytes) -> VisionItem:
    found = preprocessor(PreprocessRequest(text="What is this?", images=images))
    return VisionItem(found.pixels, found.plan, found.digest)


def tiles_of(way: Preprocessor, decoder: GpuDecoder, *files: bytes) -> list[Picture]:
    """The pictures with their pixels, decoded now; those of a batch that is too large in several turns."""
    pictures = pictures_of(item(way, *files), way.family, decoder)
    while line := [picture for picture in pictures if picture.undecoded]:
        for picture, decoded in zip(line, decoder.pixels([picture.encoded for picture in line])):
            picture.take(decoded, way.family.unit_shape)
    return pictures


def assert_near(ways: tuple[Preprocessor, Preprocessor], decoder: GpuDecoder, *files: bytes) -> None:
    """Measured: at most 0.01 in the mean, 99.9% within 1; 3 where a picture 97 pixels wide grows to 448."""
    for cut, encoded in zip(*(tiles_of(way, decoder, *files) for way in ways), strict=True):
        assert encoded.error is None, encoded.error
        assert encoded.pixels.is_cuda and encoded.pixels.dtype == torch.uint8
        difference = np.abs(encoded.pixels.cpu().numpy().astype(int) - cut.pixels)
        assert difference.mean() <= 0.08 and np.quantile(difference, 0.999) <= 1 and difference.max() <= 3


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(
    "size", [(448, 448), (1280, 720), (1919, 1081), (3840, 2160), (97, 1301), (16384, 64), (64, 16384)]
)
def test_grey_levels_are_the_cpus(ways, decoder, size, subsampling) -> None:
    assert_near(ways, decoder, page(*size, subsampling=subsampling))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotated_pictures(ways, decoder, orientation) -> None:
    assert_near(ways, decoder, page(800, 430, exif=rotated(orientation)))


def test_a_batch_of_all_sizes_is_decoded_at_once(ways, decoder) -> None:
    sizes = [(640, 480), (1280, 720), (97, 1301), (800, 600), (448, 448), (1919, 1081), (1000, 700), (300, 900)]
    assert_near(ways, decoder, *(page(*size, subsampling=number % 3) for number, size in enumerate(sizes)))


def test_memory_stays_below_what_was_announced(ways) -> None:
    """Of the whole device: the decoder's memory is not torch's."""
    small = GpuDecoder("cuda", CAPACITY)
    tiles_of(ways[1], small, page(640, 480))
    for size in ((1919, 1081), (3840, 2160), (7680, 4320), (16384, 448)):
        for orientation in (1, 6):
            pictures = pictures_of(item(ways[1], page(*size, exif=rotated(orientation))), ways[1].family, small)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            kept = small.pixels([picture.encoded for picture in pictures])
            torch.cuda.synchronize()
            own = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
            taken = own + torch.cuda.max_memory_allocated() - before
            announced = bytes_of([picture.encoded for picture in pictures])
            assert len(kept) == 1
            assert taken <= announced + (64 << 20), (size, orientation, own, taken, announced)


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
            (picture,) = tiles_of(ways[1], decoder, file)
        except InvalidRequest:
            continue
        if picture.error:
            assert "cannot be decoded" in str(picture.error)
        torch.cuda.synchronize()
        assert_near(ways, decoder, good)


def test_a_frame_that_states_another_size_is_refused_and_its_neighbours_are_not(ways, decoder) -> None:
    (picture,) = pictures_of(item(ways[1], page(640, 480)), ways[1].family, decoder)
    good, views = picture.encoded
    wrong, right = decoder.pixels([(replace(good, width=639), views), (good, views)])
    assert "640x480" in str(wrong) and "639x480" in str(wrong)
    assert torch.equal(right, decoder.pixels([(good, views)])[0])


def test_pictures_in_a_row_do_not_mix_while_the_gpu_is_busy(ways, decoder) -> None:
    files = [page(900 + 40 * number, 700) for number in range(8)]
    lines = [[pictures_of(item(ways[1], file), ways[1].family, decoder)[0].encoded] for file in files]
    alone = []
    for line in lines:
        alone.append(decoder.pixels(line)[0].clone())
        torch.cuda.synchronize()
    work = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):  # what reads the pixels waits behind this
        work = work @ work
    together = [decoder.pixels(line)[0] for line in lines]
    for one, other in zip(alone, together):
        assert torch.equal(one, other)


def test_through_the_encoder_with_its_cache(ways) -> None:
    settings = VisionSettings(runner="torch", device="cuda", infer_batch_size=5, gpu_pixels=1)
    encoder = VisionEncoder.from_checkpoint(CHECKPOINT, settings)
    first, second = page(1000, 700), page(1300, 900)
    expected = encoder.encode([item(ways[0], first, second)])[0]
    found = encoder.encode([item(ways[1], first), item(ways[0], second), item(ways[1], second)])
    rows = torch.cat([found[0], found[2]])
    assert torch.nn.functional.cosine_similarity(rows.float(), expected.float(), dim=1).min() > 0.98
