"""A request's tensors as pictures: what the wire says, checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera.errors import InvalidRequest
from tessera.family.encoded_picture import KIND_ENCODED, KIND_PIXELS, EncodedPicture
from tessera.vision.gpu_pictures import Cut, TileDecoder

_PLAN_LENGTH = 4  # kind, tiles, and of kind 0 a tile's height and width, of kind 1 the grid's rows and columns


@dataclass(frozen=True)
class VisionItem:
    """One request's pictures: uint8 pixels (flat, all pictures in order), int32 plan [4k], int64 digest [2k].

    A picture of kind 1 has a frame in ``pixels`` (``family/encoded_picture.py``).
    """

    pixels: np.ndarray
    plan: np.ndarray
    digest: np.ndarray


@dataclass
class Picture:
    """One picture on its way: ``count`` tiles, cut already or still ``encoded``.

    ``rows`` [tokens, hidden] once they are known, or the ``error`` why they never will be: InvalidRequest where the
    file is at fault.
    """

    key: Hashable
    count: int
    tiles: np.ndarray | torch.Tensor | None = None  # uint8 [count, side, side, 3]
    encoded: Cut | None = None
    rows: torch.Tensor | None = None
    error: Exception | None = None

    @property
    def size_text(self) -> str:
        """Of an encoded picture, as stored."""
        assert self.encoded is not None
        return f"{self.encoded.picture.width}x{self.encoded.picture.height} pixels"

    def readable(self, decoder: TileDecoder | None) -> bool:
        """Whether the tiles are there, decoded now if need be; False, with ``error`` set, where they cannot be."""
        if self.tiles is None and self.error is None:
            assert self.encoded is not None and decoder is not None
            try:
                self.tiles = decoder.tiles(self.encoded)
            except InvalidRequest as error:
                self.error = InvalidRequest(f"the picture of {self.size_text} cannot be decoded: {error}")
            except Exception as error:  # this picture's request alone fails, whatever went wrong
                self.error = error
        return self.error is None

    def part(self, tiles: slice) -> np.ndarray | torch.Tensor:
        """Some of the tiles, decoded before."""
        assert self.tiles is not None
        return self.tiles[tiles]


def joined(parts: Sequence[np.ndarray | torch.Tensor]) -> np.ndarray | torch.Tensor:
    """Tiles one after the other: an array, or where one part is on a device already, a tensor there."""
    device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
    if len(parts) == 1:
        return parts[0]
    if device is None:
        return np.concatenate(parts)
    return torch.cat([torch.as_tensor(part).to(device) for part in parts])


def pictures_of(item: VisionItem, tile_side: int, encoded: bool = False) -> list[Picture]:
    """One request's pictures, in order; views of the item's pixels. ``encoded``: whether some may still be.

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
        if plan[0] == KIND_ENCODED and encoded:
            cut, start = _cut(item.pixels, start, plan, f"picture {number}", tile_side)
            pictures.append(Picture((digest, plan), plan[1], encoded=cut))
            continue
        kind, tiles, height, width = plan
        if kind == KIND_ENCODED:
            raise InvalidRequest(
                f"picture {number} (kind {kind}) is encoded, and this vision stage has no picture decoder: set its "
                "picture_decoder to nvjpeg, or preprocess's gpu_pixels to 0"
            )
        # Of preprocess the grid's rows and columns, of older clients a tile's sides.
        grid = (height, width) == (tile_side, tile_side) or tiles - height * width in (0, 1)
        if kind != KIND_PIXELS or tiles < 1 or not grid:
            raise InvalidRequest(
                f"picture {number}: this model takes kind {KIND_PIXELS} with one or more tiles of "
                f"{tile_side}x{tile_side} pixels, not kind {kind} with {tiles} of {width}x{height}"
            )
        size = tiles * tile_side * tile_side * 3
        pixels = item.pixels[start : start + size]
        start += size
        if len(pixels) == size:
            pictures.append(Picture((digest, plan), tiles, pixels.reshape(tiles, tile_side, tile_side, 3)))
    if start != item.pixels.size:
        raise InvalidRequest(f"PIXELS has {item.pixels.size} bytes; the plan needs {start}")
    return pictures


def _cut(pixels: np.ndarray, start: int, plan: Sequence[int], name: str, side: int) -> tuple[Cut, int]:
    """An encoded picture whose frame begins at ``start``, and where the next one begins."""
    _, tiles, rows, columns = plan
    if rows < 1 or columns < 1 or tiles - rows * columns not in (0, 1):
        raise InvalidRequest(f"{name}: {tiles} tiles are not a grid of {columns}x{rows} with or without a thumbnail")
    picture, end = EncodedPicture.read(pixels, start, name)
    return Cut(picture, side, columns, rows, thumbnail=tiles > rows * columns), end
