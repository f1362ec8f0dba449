"""The model.py of a stage as it was before a rung of the ladder; which stage, its folder in the model repository says.

`preprocess` with Pillow, which decodes and resizes as transformers' own processor does; `vision_encoder` with its tower
in eager torch, a launch a kernel and torch's own kernels; `language_model` without CUDA graphs. No user may choose any
of it: there is no setting.
"""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from tessera.tritonserver.settings import StageSettings

STAGE = Path(__file__).parents[1].name
SWITCHED_OFF: dict[str, Any] = {"vision_encoder": {"runner": "torch"}, "language_model": {"graph_batch_size": 0}}


class EagerSettings(StageSettings):
    """As a user set them, but for what is switched off."""

    def read(self, kind: type) -> Any:
        return replace(super().read(kind), **SWITCHED_OFF[STAGE])


def decode(data: bytes, *_: object) -> np.ndarray:
    """Upright RGB pixels, uint8 [H, W, 3]."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """uint8 [H, W, 3] to uint8 [height, width, 3]."""
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


if STAGE == "preprocess":
    from tessera.preprocess import preprocessor
    from tessera.tritonserver import preprocess as package

    preprocessor.decode = decode
    preprocessor.RESIZE_MODES = {"reference": resize}
else:
    if STAGE == "vision_encoder":
        from tessera.tritonserver import vision as package
    else:
        from tessera.tritonserver import language_model as package
    package.StageSettings = EagerSettings

TritonPythonModel = package.TritonPythonModel
