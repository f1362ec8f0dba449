"""The reference resize against Pillow's BICUBIC, and how far the fast one may be from it."""

import io
import subprocess
import sys

import encoded_pictures as pictures
import numpy as np
import pytest
from PIL import Image

import scene
from tessera.preprocess.decode import RESIZE_MODES, decode, resize_fast, resize_reference

SIZES = [
    ((640, 480), (448, 448)),
    ((1080, 1920), (1344, 1792)),
    ((194, 62), (167, 12)),
    ((480, 320), (1344, 896)),
    ((333, 777), (448, 1344)),
    ((5, 900), (448, 448)),
    ((1, 1), (448, 448)),
    ((2000, 40), (448, 448)),
]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("source", "target"), SIZES)
def test_grey_levels_as_pillow(source: tuple[int, int], target: tuple[int, int], noisy: bool) -> None:
    """Black and white noise clips in the first pass, so that a wrong order of passes shows."""
    image = pictures.smooth(*source)
    if noisy:
        image = np.random.default_rng(1).integers(0, 2, image.shape, dtype=np.uint8) * 255
    found = resize_reference(image, *target)
    expected = np.asarray(Image.fromarray(image).resize(target, Image.Resampling.BICUBIC))
    assert found.shape == expected.shape and found.dtype == np.uint8
    difference = np.abs(found.astype(int) - expected)
    assert difference.mean() <= 0.1
    assert difference.max() <= 3


def test_same_size_is_not_resized() -> None:
    image = pictures.smooth(448, 448)
    assert resize_reference(image, 448, 448) is image


@pytest.mark.parametrize(("mode", "most_mean", "most"), [("reference", 0.1, 3), ("fast", 1.5, 80)])
def test_rendered_rooms_as_pillow(mode: str, most_mean: float, most: int) -> None:
    """Whole chain from JPEG bytes, to one tile, to a grid that fits and to one that is larger than the picture."""
    for seed in (3, 8, 21):
        data = scene.encode_jpeg(scene.sample(seed, "heldout"))
        whole = Image.open(io.BytesIO(data)).convert("RGB")
        for target in ((448, 448), (896, 448), (1344, 1792)):
            expected = np.asarray(whole.resize(target, Image.Resampling.BICUBIC)).astype(int)
            found = RESIZE_MODES[mode](decode(data, enough=target if mode == "fast" else None), *target)
            difference = np.abs(found - expected)
            assert found.shape == expected.shape and found.dtype == np.uint8
            assert difference.mean() <= most_mean and difference.max() <= most, (seed, target)


def test_fast_shrinks_by_means_over_whole_blocks() -> None:
    image = np.random.default_rng(2).integers(0, 256, (80, 60, 3), dtype=np.uint8)
    found = resize_fast(image, 30, 20)
    expected = image.reshape(20, 4, 30, 2, 3).mean(axis=(1, 3))
    assert np.abs(found - expected).max() <= 1


PROGRAM = """
import sys
import cv2, numpy
from tessera.preprocess.preprocessor import Preprocessor
from tessera.preprocess.decode import RESIZE_MODES, use_one_thread
use_one_thread(sys.argv[1])
RESIZE_MODES[sys.argv[1]](numpy.zeros((900, 900, 3), numpy.uint8), 448, 448)
torch = sys.modules.get("torch")
print(cv2.getNumThreads(), torch and torch.get_num_threads())
"""


@pytest.mark.parametrize(("mode", "threads"), [("reference", "1 1"), ("fast", "1 None")])
def test_one_thread_and_torch_for_the_reference_alone(mode: str, threads: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == threads
