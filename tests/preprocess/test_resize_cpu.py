"""The reference resize against Pillow's BICUBIC."""

from __future__ import annotations

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

from tessera.preprocess.resize_cpu import resize_reference

SIZES = [
    ((640, 480), (448, 448)),
    ((1080, 1920), (1344, 1792)),
    ((400, 460), (448, 448)),
    ((194, 62), (167, 12)),
    ((480, 320), (1344, 896)),
    ((1280, 720), (448, 448)),
    ((333, 777), (448, 1344)),
    ((5, 900), (448, 448)),
    ((1, 1), (448, 448)),
    ((2000, 40), (448, 448)),
]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_grey_levels_as_pillow(source: tuple[int, int], target: tuple[int, int], noisy: bool) -> None:
    width, height = source
    image = pictures.smooth(width, height)
    if noisy:
        image = np.random.default_rng(1).integers(0, 256, image.shape, dtype=np.uint8)
    found = resize_reference(image, *target)
    expected = np.asarray(Image.fromarray(image).resize(target, Image.Resampling.BICUBIC))
    assert found.shape == expected.shape and found.dtype == np.uint8
    difference = np.abs(found.astype(int) - expected)
    assert difference.mean() <= 0.1
    assert difference.max() <= 3


def test_random_sizes_in_both_orders_of_passes() -> None:
    """Black and white noise clips in the first pass, so that a wrong order of passes shows."""
    dice = np.random.default_rng(5)
    worst = 0.0
    for width, height, *target in dice.integers(8, 200, (120, 4)).tolist():
        image = dice.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255
        expected = np.asarray(Image.fromarray(image).resize(tuple(target), Image.Resampling.BICUBIC))
        worst = max(worst, float(np.abs(resize_reference(image, *target).astype(int) - expected).mean()))
    assert worst <= 0.1


def test_same_size_is_not_resized() -> None:
    image = pictures.smooth(448, 448)
    assert resize_reference(image, 448, 448) is image
