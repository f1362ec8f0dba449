"""The stage `preprocess` with Pillow: it decodes the pictures and resizes them, as transformers' own processor does."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps

from tessera.preprocess import preprocessor
from tessera.preprocess.decode import ResizeMode
from tessera.tritonserver.preprocess import TritonPythonModel  # noqa: F401


def decode(data: bytes, *_: object) -> np.ndarray:
    """Upright RGB pixels, uint8 [H, W, 3]."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3] to uint8 [height, width, 3]."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


preprocessor.decode = decode
preprocessor.RESIZE_MODES = {"reference": ResizeMode(resize, reduced=False)}
