"""What a rendered page is: its picture and its blocks in reading order."""

from dataclasses import dataclass, field

import numpy as np

# MinerU's names of blocks, of those that these pages have.
KINDS = (
    *("title", "text", "list_item", "table", "table_caption", "equation", "image", "image_caption"),
    *("header", "footer", "page_number"),
)
NOT_READ = ("image",)
"""Kinds whose crop is never asked for: a client takes the picture itself."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the page."""


@dataclass
class Block:
    """One block: its box around all of its ink, the answer to its crop, and what is written where.

    ``places`` float32 [glyphs, 2]: middles (x, y) of the glyphs in ``glyphs``, in pixels of the page.
    """

    kind: str
    box: Box
    answer: str = ""
    glyphs: str = ""
    places: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.float32))


@dataclass
class Page:
    """``picture`` uint8 [height, width], grey; ``blocks`` in reading order."""

    picture: np.ndarray
    blocks: list[Block]


def read_blocks(page: Page) -> list[Block]:
    """Those whose crops are asked for."""
    return [block for block in page.blocks if block.kind not in NOT_READ and block.answer]


def thousandths(box: Box, page: Page) -> tuple[int, int, int, int]:
    """The box as an answer states it: 0..999 of width and height, no side of no length."""
    height, width = page.picture.shape
    left, top = (min(998, max(0, round(1000 * side / size))) for side, size in zip(box[:2], (width, height)))
    right, bottom = (min(999, max(0, round(1000 * side / size))) for side, size in zip(box[2:], (width, height)))
    return left, top, max(right, left + 1), max(bottom, top + 1)
