"""What follows the decoding on the GPU, here on the CPU: orientation, resize and cut, against the CPU's way."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.preprocess.preprocessor import Preprocessor, PreprocessRequest
from tessera.vision.pictures import pixels_of

CHECKPOINT = Path(__file__).parents[2] / "build" / "default_model" / "checkpoint"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("policy", [{"max_tiles": 6}, {"max_tiles": 2, "thumbnail": "never"}, {"max_tiles": 1}])
def test_tiles_are_those_that_preprocess_cuts(orientation: int, policy: dict) -> None:
    """Noise of black and white clips between the passes of the resize, so that a wrong order shows."""
    tags, stream = Image.Exif(), io.BytesIO()
    tags[0x0112] = orientation
    dice = np.random.default_rng(orientation)
    picture = Image.fromarray(dice.integers(0, 2, (250, 611, 3), dtype=np.uint8) * 255)
    picture.save(stream, "JPEG", exif=tags.tobytes())
    stage = Preprocessor.from_checkpoint(CHECKPOINT)
    expected = stage(PreprocessRequest(text="?", images=[stream.getvalue()], tile_policy=policy))
    stored = torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1)
    found = pixels_of(stored, orientation, expected.plans[0].views)
    assert found.dtype == torch.uint8 and found.shape == expected.pixels.shape
    difference = np.abs(found.int().numpy() - expected.pixels)
    assert difference.mean() <= 0.1 and difference.max() <= 2
