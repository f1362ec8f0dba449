"""Rendered pages of documents, each from its seed alone: ``sample(seed, split)``."""

from random import Random

from pages.composition import Composer
from pages.page import KINDS, Block, Box, Page, read_blocks, thousandths
from pages.scanning import scanned

__all__ = ["KINDS", "Block", "Box", "Page", "read_blocks", "sample", "thousandths"]


def sample(seed: int, split: str = "train") -> Page:
    """The page of a seed. Splits draw from streams of their own: no page of "heldout" is one of "train"."""
    dice = Random(f"{split}/{seed}")
    return scanned(Composer(dice).page(), dice)
