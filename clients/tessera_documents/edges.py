"""Boxes whose edges cut through letters, moved to where the letters end.

A crop without the feet of its letters is misread by any model, and a small model's boxes can lie half a line off.
An edge that cuts nothing stays where it is, so that boxes which fit are left alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

CONTAINERS = ("list", "image_block", "equation_block")
NOT_READ = ("image", "chart", *CONTAINERS)
"""Kinds of blocks whose own letters are not asked for."""
REACH = 0.015  # of the page's longer side: no edge moves further
SPACE = 0.005  # of it: letters no further from each other are of one line
CONTRAST = 48  # of 255 levels: paper's grain differs less from its middle
Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels; what it holds ends before right and bottom."""


def clear_of_letters(page: Image.Image, blocks: Sequence[Any]) -> None:
    """Moves, in place, edges of MinerU's ``blocks`` (``type``, ``angle``, ``bbox`` as fractions of the page).

    What an edge cuts, a line of letters or a table's frame, is of the block that has half of it or more than any other:
    there the edge moves out to its end, and another block's moves back. Blocks around others are not asked, and turned
    ones are left alone.
    """
    picture = page.convert("L")
    gray = np.asarray(picture)
    height, width = gray.shape
    scale = (width, height, width, height)
    space = round(SPACE * max(gray.shape))
    boxes = [_pixels(block.bbox, scale) for block in blocks]
    rivals = [box for block, box in zip(blocks, boxes) if block.type not in CONTAINERS]
    for block, box in zip(blocks, boxes):
        if block.type in NOT_READ or block.angle in (90, 270):
            continue
        others = [other for other in rivals if not _holds(other, box)]
        is_ink = _is_ink(picture.crop(box).histogram())
        # First which lines it has; that says which letters stand at its sides.
        moved = _moved(gray, is_ink, box, others, space=0)
        moved = _turned(_moved(gray.T, is_ink, _turned(moved), [_turned(other) for other in others], space))
        if moved != box:
            block.bbox = [edge / side for edge, side in zip(moved, scale)]


def _pixels(bbox: Sequence[float], scale: Sequence[int]) -> Box:
    left, top, right, bottom = (round(edge * side) for edge, side in zip(bbox, scale))
    return left, top, right, bottom


def _holds(other: Box, box: Box) -> bool:
    """Whether at least half of ``box`` is in ``other``, which may be itself."""
    wide, high = _shared(other[::2], box[::2]), _shared(other[1::2], box[1::2])
    return 2 * wide * high >= (box[2] - box[0]) * (box[3] - box[1])


def _turned(box: Box) -> Box:
    left, top, right, bottom = box
    return top, left, bottom, right


def _moved(gray: np.ndarray, is_ink: np.ndarray, box: Box, others: Sequence[Box], space: int) -> Box:
    """``box`` with its top and bottom where they cut no ink on the page, gray uint8 [height, width]; gaps of up to
    ``space`` between ink count as ink."""
    left, top, right, bottom = box
    reach = round(REACH * max(gray.shape))
    rivals = [
        (y0, y1)
        for x0, y0, x1, y1 in others
        if 2 * _shared((x0, x1), (left, right)) >= min(x1 - x0, right - left)  # above, below or around it
    ]

    def clear(edge: int, outwards: bool) -> int:
        first = max(0, edge - reach)
        ink = is_ink[gray[first : edge + reach, left:right]].any(axis=1)
        cut = next((run for run in _runs(ink, space, first) if run[0] < edge < run[1]), None)
        if cut is None:
            return edge
        mine = _shared(cut, (top, bottom))
        most = max(((_shared(cut, rival), -rival[0]) for rival in rivals), default=(0, 0))
        is_mine = 2 * mine > cut[1] - cut[0] or (mine, -top) >= most
        end = cut[outwards == is_mine]
        goes_on = end in (first, first + len(ink)) and 0 < end < len(gray)  # beyond what is looked at
        return edge if goes_on else end

    above, below = clear(top, False), clear(bottom, True)
    return (left, above, right, below) if above < below else box


def _is_ink(histogram: Sequence[int]) -> np.ndarray:
    """bool [256], of each level: whether it differs from a block's paper more than half as much as its strongest ink
    does. ``histogram``: how often the block has each level."""
    levels = np.cumsum(histogram)
    low, paper, high = np.searchsorted(levels, levels[-1] * np.array([0.005, 0.5, 0.995]))
    off = np.abs(np.arange(256) - paper)
    return off > max(CONTRAST, off[low] / 2, off[high] / 2)


def _runs(ink: np.ndarray, space: int, first: int) -> list[tuple[int, int]]:
    """Where bool [n] is True, gaps of up to ``space`` included: begins and ends, of which ``first`` is its first."""
    at = np.flatnonzero(ink)
    groups = np.split(at, np.flatnonzero(np.diff(at) > space + 1) + 1)
    return [(first + int(group[0]), first + int(group[-1]) + 1) for group in groups if len(group)]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How much two spans have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
