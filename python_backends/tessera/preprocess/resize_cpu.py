"""Pillow's antialiased bicubic, at several times its speed."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate


def resize_reference(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """``image`` uint8 [H, W, 3] resized to uint8 [height, width, 3]; the result may be the image itself.

    torch's antialiased uint8 bicubic (a = -0.5) works as Pillow's BICUBIC does: two passes in fixed point. On a
    channels-last view no copy is made. It uses the calling thread only.
    """
    if image.shape[:2] == (height, width):
        return image
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0)
    resized = interpolate(pixels, size=(height, width), mode="bicubic", align_corners=False, antialias=True)
    return resized.squeeze(0).permute(1, 2, 0).contiguous().numpy()
