"""From a JPEG's three planes to tiles: the chroma spread, the colours, the resize and the cut, on any torch device.

Each step gives the grey levels of the CPU way (libjpeg-turbo, then the `reference` resize of preprocess): nearest
chroma, which nvJPEG's own RGB has, blurs the edges of coloured letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

# Bytes at the peak: for each pixel of the picture, each of the resize's weights while they are made, each pixel between
# its two passes, and each of the grid.
PICTURE_BYTES, WEIGHT_BYTES, PASS_BYTES, GRID_BYTES = 17, 24, 4, 12


def tiles_of_planes(
    planes: Sequence[torch.Tensor], orientation: int, side: int, columns: int, rows: int, thumbnail: bool
) -> torch.Tensor:
    """uint8 tiles [t, side, side, 3]: the grid row by row, then the thumbnail.

    Args:
        planes: Y, Cb, Cr, uint8 [height, width] each, the chroma of 1x1, 2x1 or 2x2 pixels a sample (rounded up).
        orientation: EXIF's, 1..8, to be undone.
    """
    return cut(colours(*full_planes(planes, orientation)), side, columns, rows, thumbnail)


def cut(channels: Iterable[torch.Tensor], side: int, columns: int, rows: int, thumbnail: bool) -> torch.Tensor:
    """Three float32 [height, width], one after the other, so that one alone is held: resized and cut into tiles.

    On a GPU in float16: its 11 bits hold whole grey levels, and weights well enough for sums to a tenth of one.
    """
    count = rows * columns
    for number, whole in enumerate(channels):
        channel = whole.half() if whole.is_cuda else whole
        if number == 0:
            to_grid = Resize(channel, columns * side, rows * side)
            to_thumbnail = Resize(channel, side, side) if thumbnail else None
            tiles = torch.empty((count + thumbnail, side, side, 3), dtype=torch.uint8, device=channel.device)
        grid = to_grid(channel).view(rows, side, columns, side)
        tiles[:count].view(rows, columns, side, side, 3)[..., number] = grid.transpose(1, 2)
        if to_thumbnail:
            tiles[count, ..., number] = to_thumbnail(channel)
    return tiles


def peak_bytes(width: int, height: int, side: int, columns: int, rows: int) -> int:
    """Bytes that tiles_of_planes holds at most, its planes and its tiles with them; for an upright width and height."""
    across, down = columns * side, rows * side
    weights = width * across + height * down
    between = max(height * across, width * down)
    return PICTURE_BYTES * width * height + WEIGHT_BYTES * weights + PASS_BYTES * between + GRID_BYTES * across * down


def full_planes(planes: Sequence[torch.Tensor], orientation: int) -> list[torch.Tensor]:
    """All three as large as the first and upright, uint8."""
    height, width = planes[0].shape
    return [upright(spread(plane, width, height), orientation) for plane in planes]


def spread(plane: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """A plane of ``width`` x ``height`` from one of as many or half as many samples: libjpeg's "fancy" upsampling.

    Each new sample is 3/4 of the nearer and 1/4 of the farther one, along both axes before anything is rounded; what
    lies between two whole numbers goes up and down in turns (the constants 1, 2 and 8, 7).
    """
    across, down = plane.shape[1] < width, plane.shape[0] < height
    if not (across or down):
        return plane
    samples = plane.to(torch.int16)
    if down:
        samples = _doubled(samples, 0)
    samples = _doubled(samples, 1)
    samples[:, 0::2] += 8 if down else 1
    samples[:, 1::2] += 7 if down else 2
    samples >>= 4 if down else 2
    return samples[:height, :width].to(torch.uint8)


def _doubled(samples: torch.Tensor, axis: int) -> torch.Tensor:
    """Between its neighbours each sample becomes two, of four times the weight; the edges repeat."""
    length = samples.shape[axis]
    before = torch.cat([samples.narrow(axis, 0, 1), samples.narrow(axis, 0, length - 1)], axis)
    after = torch.cat([samples.narrow(axis, 1, length - 1), samples.narrow(axis, length - 1, 1)], axis)
    return torch.stack([before.add_(samples, alpha=3), after.add_(samples, alpha=3)], axis + 1).flatten(axis, axis + 1)


def upright(plane: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undo an EXIF orientation (1..8)."""
    if orientation >= 5:
        plane = plane.t()
    flips = ([1] if orientation in (2, 3, 6, 7) else []) + ([0] if orientation in (3, 4, 7, 8) else [])
    return plane.flip(flips).contiguous() if flips else plane.contiguous()


def colours(luma: torch.Tensor, blue: torch.Tensor, red: torch.Tensor) -> Iterator[torch.Tensor]:
    """Red, green and blue one after the other, float32 of whole numbers, from Y, Cb and Cr of one size (JFIF).

    libjpeg counts in 1/65536 and rounds once; all its sums are below 2^24, so that float32 holds them exactly.
    """
    for from_blue, from_red in ((0, 91881), (-22554, -46802), (116130, 0)):
        whole = torch.full_like(luma, 32768, dtype=torch.float32)
        for plane, factor in ((blue, from_blue), (red, from_red)):
            if factor:
                whole.add_(plane.to(torch.float32).sub_(128), alpha=factor)
        yield whole.mul_(2**-16).floor_().add_(luma).clamp_(0, 255)


class Resize:
    """Pillow's antialiased bicubic for planes of one size: a product with a banded matrix along each axis.

    Whole numbers between the two, which come in Pillow 13's order; all in the dtype of ``like``, a plane of that size.
    Most weights are 0, which tensor cores do not notice.
    """

    def __init__(self, like: torch.Tensor, width: int, height: int) -> None:
        rows, columns = like.shape
        self._across = weights(columns, width, like.device).to(like.dtype).t() if width != columns else None
        self._down = weights(rows, height, like.device).to(like.dtype) if height != rows else None
        self._down_first = height < rows and rows - height > 2 * (columns - width)

    def __call__(self, plane: torch.Tensor) -> torch.Tensor:
        """[rows, columns] to [height, width], whole numbers both."""
        for downwards in (self._down_first, not self._down_first):
            if downwards and self._down is not None:
                plane = (self._down @ plane).round_().clamp_(0, 255)
            elif not downwards and self._across is not None:
                plane = (plane @ self._across).round_().clamp_(0, 255)
        return plane


def weights(source: int, target: int, device: torch.device) -> torch.Tensor:
    """Float32 [target, source]: Keys' cubic (a = -0.5), stretched where two targets are more than a pixel apart."""
    scale = source / target
    centres = (torch.arange(target, device=device, dtype=torch.float32) + 0.5) * scale
    places = torch.arange(source, device=device, dtype=torch.float32) + 0.5
    x = (places - centres[:, None]).abs_().div_(max(scale, 1.0))
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    band = torch.where(x < 1, inner, torch.where(x < 2, outer, 0))
    return band / band.sum(1, keepdim=True)
