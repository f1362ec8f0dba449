"""The torch way from planes to tiles against libjpeg-turbo's decode and the CPU's resize.

Planes are known exactly where each block of 8x8 samples has one colour and the quality is 100: then nothing is lost.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.preprocess.decode import decode
from tessera.preprocess.preprocessor import Preprocessor
from tessera.preprocess.resize_cpu import resize_reference
from tessera.vision.jpeg_planes import Resize, colours, full_planes, spread, tiles_of_planes

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
STEPS = {0: (1, 1), 1: (2, 1), 2: (2, 2)}  # Pillow's `subsampling` -> pixels a chroma sample, across and down


def blocks(
    width: int, height: int, subsampling: int, seed: int = 0, **options: object
) -> tuple[bytes, list[torch.Tensor]]:
    """A JPEG and its planes Y, Cb, Cr as stored."""
    dice = np.random.default_rng(seed)
    planes = []
    for across, down in ((1, 1), STEPS[subsampling], STEPS[subsampling]):
        columns, rows = -(-width // (8 * across)), -(-height // (8 * down))
        coarse = dice.integers(0, 256, (rows, columns), dtype=np.uint8)
        planes.append(coarse.repeat(8, 0).repeat(8, 1)[: -(-height // down), : -(-width // across)])
    whole = [plane.repeat(-(-height // len(plane)), 0)[:height] for plane in planes]
    whole = [plane.repeat(-(-width // plane.shape[1]), 1)[:, :width] for plane in whole]
    stream = io.BytesIO()
    picture = Image.merge("YCbCr", [Image.fromarray(np.ascontiguousarray(plane)) for plane in whole])
    picture.save(stream, "JPEG", quality=100, subsampling=subsampling, **options)
    return stream.getvalue(), [torch.from_numpy(np.ascontiguousarray(plane)) for plane in planes]


@pytest.mark.parametrize("subsampling", STEPS)
@pytest.mark.parametrize(("width", "height"), [(160, 96), (161, 97), (163, 41), (17, 250)])
def test_colours_equal_libjpegs(width: int, height: int, subsampling: int) -> None:
    jpeg, planes = blocks(width, height, subsampling)
    found = torch.stack(list(colours(*full_planes(planes, 1))), -1)
    assert torch.equal(found, torch.from_numpy(decode(jpeg)).float())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone(orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    jpeg, planes = blocks(96, 40, 2, exif=tags.tobytes())
    found = torch.stack(list(colours(*full_planes(planes, orientation))), -1)
    assert torch.equal(found, torch.from_numpy(decode(jpeg)).float())


def test_every_rounding_of_the_triangle_filter() -> None:
    """Against the formula in words: 9, 3, 3 and 1 sixteenths, rounded by 8 in even columns and by 7 in odd ones."""
    plane = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 6), dtype=np.uint8))
    padded = np.pad(plane.numpy().astype(int), 1, mode="edge")
    found = spread(plane, 11, 9)
    assert found.shape == (9, 11)
    for y in range(9):
        for x in range(11):
            row, column = y // 2 + 1, x // 2 + 1
            far_row, far_column = row + (1 if y % 2 else -1), column + (1 if x % 2 else -1)
            total = 9 * padded[row, column] + padded[far_row, far_column]
            total += 3 * padded[far_row, column] + 3 * padded[row, far_column]
            assert found[y, x] == (total + (7 if x % 2 else 8)) // 16


SIZES = [((640, 480), (448, 448)), ((400, 460), (448, 448)), ((333, 777), (448, 1344)), ((2000, 40), (448, 448))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_resize_gives_the_references_grey_levels(
    source: tuple[int, int], target: tuple[int, int], dtype: torch.dtype
) -> None:
    """Noise of black and white clips between the passes, so that a wrong order shows."""
    image = np.random.default_rng(2).integers(0, 2, (source[1], source[0], 3), dtype=np.uint8) * 255
    expected = resize_reference(image, *target).astype(int)
    for channel in range(3):
        plane = torch.from_numpy(image[..., channel]).to(dtype)
        found = Resize(plane, *target)(plane)
        difference = np.abs(found.float().numpy() - expected[..., channel])
        assert difference.mean() <= 0.1 and difference.max() <= 2


@pytest.mark.parametrize(("columns", "rows", "thumbnail"), [(3, 2, True), (1, 2, False), (1, 1, False)])
def test_tiles_as_preprocess_cuts_them(columns: int, rows: int, thumbnail: bool) -> None:
    jpeg, planes = blocks(301, 203, 2)
    side, count = 448, columns * rows + thumbnail
    found = tiles_of_planes(planes, 1, side, columns, rows, thumbnail)
    preprocess = Preprocessor.from_checkpoint(CHECKPOINT)
    picture = replace(
        preprocess.picture(jpeg, preprocess.policy), plan=preprocess.family.plan_of((count, rows, columns))
    )
    expected = preprocess.pixels([picture]).reshape(count, side, side, 3).astype(int)
    assert found.dtype == torch.uint8 and found.shape == expected.shape
    difference = np.abs(found.float().numpy() - expected)
    assert difference.mean() <= 0.1 and difference.max() <= 2
