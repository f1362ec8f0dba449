"""Resize modes: Pillow's antialiased bicubic at several times its speed, and a faster one that is only like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np


@dataclass(frozen=True)
class ResizeMode:
    """``resize(image, width, height)``: uint8 [H, W, 3] to uint8 [height, width, 3], maybe the image itself.

    ``reduced``: whether the decoder may leave out pixels that the resize has no need of.
    """

    resize: Callable[[np.ndarray, int, int], np.ndarray]
    reduced: bool


def use_one_thread(name: str) -> None:
    """One thread for everything that the mode needs in this process; also loads it. Processes scale to the cores."""
    cv2.setNumThreads(1)
    if name == "reference":
        import torch

        torch.set_num_threads(1)


def resize_reference(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Equals Pillow's BICUBIC but for the rounding of its weights.

    That is: a = -0.5, antialiased, two passes with a uint8 picture between them. The order of the passes shows where
    the first one clips. It is Pillow 13's: vertical first where the height shrinks by more than twice what the width
    does (older Pillow: horizontal first, always).
    """
    rows, columns = image.shape[:2]
    if height < rows and rows - height > 2 * (columns - width):
        image = _bicubic(image, columns, height)
    return _bicubic(image, width, height)


def _bicubic(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """torch's own order: horizontal first. Channels-last in and out, its fast path: no transposition, no copy.

    The batch axis comes before the permutation: added after it, its stride hides the layout from torch.
    """
    if image.shape[:2] == (height, width):
        return image
    # Here, since it takes 190 MB of memory that no other mode needs.
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2)
    resized = interpolate(pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0).contiguous().numpy()


def resize_fast(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """Halve each side while it is at least twice too long, then OpenCV's bicubic (a = -0.75) to the size.

    Halving, the mean of two pixels, is all the antialiasing. Linear interpolation at a factor of exactly two is that
    mean; OpenCV's area mode gives the same but is quick for both sides at once only, and at factors that are not whole
    it takes longer than ``resize_reference``.
    """
    while image.shape[0] >= 2 * height or image.shape[1] >= 2 * width:
        down, across = (0.5 if side >= 2 * target else 1 for side, target in zip(image.shape, (height, width)))
        image = cv2.resize(image, None, fx=across, fy=down, interpolation=cv2.INTER_LINEAR)
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC)


RESIZE_MODES = {"reference": ResizeMode(resize_reference, reduced=False), "fast": ResizeMode(resize_fast, reduced=True)}
