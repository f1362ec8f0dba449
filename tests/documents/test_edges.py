"""Edges that cut through letters move to where those end; all others stay. And on rendered pages, where it is known."""

from collections.abc import Sequence

import numpy as np
import pytest
from mineru_vl_utils.structs import ContentBlock
from PIL import Image

import pages
from tessera_documents import clear_of_letters

SIDE = 1000  # pixels: edges are thousandths of the page
LINES = ((100, 112), (120, 132), (160, 172))
LETTERS = range(100, 500, 10)  # five pixels wide each
WHOLE = (100, 100, 495, 132)
"""The two lines that stand near to each other."""


def page(paper: int = 255, ink: int = 0) -> np.ndarray:
    picture = np.full((SIDE, SIDE), paper, np.uint8)
    for top, bottom in LINES:
        for left in LETTERS:
            picture[top:bottom, left : left + 5] = ink
    return picture


def moved(picture: np.ndarray, *boxes: Sequence[int], kinds: Sequence[str] = (), angle: int | None = 0) -> list[tuple]:
    kinds = [*kinds, *["text"] * (len(boxes) - len(kinds))]
    blocks = [ContentBlock(kind, [edge / SIDE for edge in box], angle=angle) for kind, box in zip(kinds, boxes)]
    clear_of_letters(Image.fromarray(picture).convert("RGB"), blocks)
    return [tuple(round(SIDE * edge, 6) for edge in block.bbox) for block in blocks]


@pytest.mark.parametrize(
    ("box", "becomes"),
    [
        (WHOLE, WHOLE),
        ((90, 95, 505, 140), (90, 95, 505, 140)),
        ((95, 94, 505, 126), (95, 94, 505, 132)),
        ((95, 106, 505, 136), (95, 100, 505, 136)),
        ((95, 111, 505, 121), (95, 100, 505, 132)),
        ((95, 95, 486, 135), (95, 95, 495, 135)),
        ((113, 95, 505, 135), (100, 95, 505, 135)),
        ((95, 95, 470, 135), (95, 95, 470, 135)),  # the line goes on beyond the reach
        ((95, 113, 505, 119), (95, 113, 505, 119)),  # between two lines
    ],
)
def test_an_edge_moves_to_the_end_of_what_it_cuts_and_no_other_does(box: tuple, becomes: tuple) -> None:
    assert moved(page(), box) == [becomes]
    assert moved(page(), becomes) == [becomes]


@pytest.mark.parametrize(("paper", "ink"), [(0, 255), (200, 90), (60, 170)])
def test_letters_of_any_color(paper: int, ink: int) -> None:
    grain = np.random.default_rng(5).integers(-12, 13, (SIDE, SIDE))
    picture = np.clip(page(paper, ink) + grain, 0, 255).astype(np.uint8)
    assert moved(picture, (95, 94, 486, 126)) == [(95, 94, 495, 132)]


NOTHING_OR_ALL = [(0, 0, 1000, 1000), (500, 500, 500.4, 600), (999, 999, 1000, 1000), (600, 600, 700, 700)]


@pytest.mark.parametrize(
    ("kinds", "boxes", "become"),
    [
        ("text text", [(95, 90, 505, 124), (95, 124, 505, 180)], [(95, 90, 505, 120), (95, 120, 505, 180)]),
        ("text text", [(95, 128, 505, 180), (95, 90, 505, 128)], [(95, 132, 505, 180), (95, 90, 505, 132)]),
        # Of equals the upper one has it; what a figure's box reaches into is still read.
        ("text text", [(95, 90, 505, 126), (95, 126, 505, 180)], [(95, 90, 505, 132), (95, 132, 505, 180)]),
        ("image text", [(90, 20, 505, 129), (95, 124, 505, 180)], [(90, 20, 505, 129), (95, 120, 505, 180)]),
        # Those beside each other have lines of their own, even where they overlap by a little.
        ("text text", [(95, 95, 301, 130), (300, 95, 505, 136)], [(95, 95, 290, 132), (290, 95, 505, 136)]),
        ("text image", [(95, 95, 297, 130), (300, 95, 505, 136)], [(95, 95, 297, 132), (300, 95, 505, 136)]),
        # A block around it is no rival.
        ("list text", [(90, 90, 510, 140), (95, 94, 505, 126)], [(90, 90, 510, 140), (95, 94, 505, 132)]),
        ("code text", [(95, 93, 505, 140), (95, 94, 505, 126)], [(95, 93, 505, 140), (95, 94, 505, 132)]),
        ("text text text text", NOTHING_OR_ALL, NOTHING_OR_ALL),
    ],
)
def test_a_line_is_of_the_block_that_has_most_of_it(kinds: str, boxes: list[tuple], become: list[tuple]) -> None:
    assert moved(page(), *boxes, kinds=kinds.split()) == become


def test_letters_may_end_with_the_page() -> None:
    picture = np.roll(page(), -100, axis=0)
    assert moved(picture, (95, 6, 505, 40)) == [(95, 0, 505, 40)]
    assert moved(picture[::-1], (95, 960, 505, 994)) == [(95, 960, 505, 1000)]


def test_what_is_not_read_is_left_alone_and_keeps_its_own() -> None:
    picture, cut = page(), (95, 94, 505, 126)
    for kind in ("image", "chart", "list", "image_block", "equation_block"):
        assert moved(picture, cut, kinds=[kind]) == [cut]
    assert moved(picture, cut, angle=90) == moved(picture, cut, angle=270) == [cut]
    picture[60:104, 100:495] = 0  # a figure, of which a caption has the last rows
    picture[104:108] = 255
    assert moved(picture, (90, 50, 505, 99), (95, 101, 505, 114), kinds=["image"])[1] == (95, 104, 505, 114)


def test_a_table_keeps_its_frame() -> None:
    picture = np.full((SIDE, SIDE), 255, np.uint8)
    picture[200:300, 200:800], picture[202:298, 202:798] = 0, 255
    assert moved(picture, (201, 205, 790, 299), kinds=["table"]) == [(200, 200, 800, 300)]


def test_true_boxes_of_rendered_pages_stay_and_shifted_ones_get_their_letters_back() -> None:
    whole, cut = 0, 0
    for seed in range(2):
        sample = pages.sample(seed, "heldout")
        kinds = [block.kind for block in sample.blocks]
        true = [pages.thousandths(block.box, sample) for block in sample.blocks]
        assert moved(sample.picture, *true, kinds=kinds) == true
        for number, ((left, top, right, bottom), kind) in enumerate(zip(true, kinds)):
            for shift in (-4, 4) if kind not in ("table", "image", "equation") else ():
                boxes = [*true[:number], (left, top + shift, right, bottom + shift), *true[number + 1 :]]
                above, below = moved(sample.picture, *boxes, kinds=kinds)[number][1::2]
                cut += 1
                whole += above <= top + 2 and below >= bottom - 2  # true boxes have a margin of that
    assert cut > 25 and whole / cut > 0.9
