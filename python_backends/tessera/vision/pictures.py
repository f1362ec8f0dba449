"""A request's tensors as pictures: what the wire says, checked."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from tessera.errors import InvalidRequest

KIND_TILES = 0
_PLAN_LENGTH = 4  # kind, t, h, w


@dataclass(frozen=True)
class VisionItem:
    """One request's pictures: uint8 pixels (flat, all pictures in order), int32 plan [4k], int64 digest [2k]."""

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray


@dataclass
class Picture:
    """One picture on its way; ``rows`` [tokens, hidden] once they are known."""

    key: Hashable
    tiles: np.ndarray  # uint8 [t, side, side, 3]
    rows: torch.Tensor | None = None


def pictures_of(item: VisionItem, tile_side: int) -> list[Picture]:
    """One request's pictures, in order; their tiles are views of the item's pixels.

    Raises InvalidRequest when pixels, plan and digest do not agree.
    """
    if item.plan.size % _PLAN_LENGTH:
        raise InvalidRequest(f"PLAN has {item.plan.size} values; it needs {_PLAN_LENGTH} for each picture")
    plans = [tuple(int(value) for value in row) for row in item.plan.reshape(-1, _PLAN_LENGTH)]
    if item.digest.size != 2 * len(plans):
        raise InvalidRequest(f"DIGEST has {item.digest.size} values for {len(plans)} pictures; it needs 2 each")
    digests = [tuple(int(value) for value in row) for row in item.digest.reshape(-1, 2)]
    pictures, start = [], 0
    for number, (plan, digest) in enumerate(zip(plans, digests, strict=True)):
        kind, tiles, height, width = plan
        if kind != KIND_TILES or tiles < 1 or height != tile_side or width != tile_side:
            raise InvalidRequest(
                f"picture {number}: this model takes kind {KIND_TILES} with one or more tiles of "
                f"{tile_side}x{tile_side} pixels, not kind {kind} with {tiles} of {width}x{height}"
            )
        end = start + tiles * height * width * 3
        pixels = item.pixels[start:end]
        start = end
        if len(pixels) == tiles * height * width * 3:
            pictures.append(Picture((digest, plan), pixels.reshape(tiles, height, width, 3)))
    if start != item.pixels.size:
        raise InvalidRequest(f"PIXELS has {item.pixels.size} bytes; the plan needs {start}")
    return pictures
