"""What follows the decoding on the GPU, here on the CPU: orientation, resize and cut, against the CPU's way."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.models.family import View
from tessera.preprocess.decode import resize_reference
from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.pictures import pixels_of, resized

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"
SIZES = [((640, 480), (448, 448)), ((400, 460), (448, 448)), ((333, 777), (448, 1344)), ((2000, 40), (448, 448))]


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_resize_gives_the_references_grey_levels(source: tuple[int, int], target: tuple[int, int]) -> None:
    """Noise of black and white clips between the passes, so that a wrong order shows."""
    image = np.random.default_rng(2).integers(0, 2, (source[1], source[0], 3), dtype=np.uint8) * 255
    expected = resize_reference(image, *target).astype(int)
    found = resized(torch.from_numpy(image).permute(2, 0, 1)[None].float(), View(*target, (), ()))
    difference = np.abs(found[0].permute(1, 2, 0).float().numpy() - expected)
    assert difference.mean() <= 0.1 and difference.max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("policy", [{"max_tiles": 6}, {"max_tiles": 2, "thumbnail": "never"}, {"max_tiles": 1}])
def test_tiles_are_those_that_preprocess_cuts(orientation: int, policy: dict) -> None:
    tags, stream = Image.Exif(), io.BytesIO()
    tags[0x0112] = orientation
    dice = np.random.default_rng(orientation)
    picture = Image.fromarray(dice.integers(0, 256, (25, 60, 3), dtype=np.uint8)).resize((611, 250))
    picture.save(stream, "JPEG", exif=tags.tobytes())
    stage = Preprocessor.from_checkpoint(CHECKPOINT)
    expected = stage(PreprocessRequest(text="?", images=[stream.getvalue()], tile_policy=policy))
    stored = torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1)
    found = pixels_of(stored, orientation, expected.plans[0].views)
    assert found.dtype == torch.uint8 and found.shape == expected.pixels.shape
    difference = np.abs(found.int().numpy() - expected.pixels)
    assert difference.mean() <= 0.1 and difference.max() <= 2
