"""From pages to what the model is asked and answers: crops as MinerU's client cuts them, answers in its grammar."""

import math
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np
from document_tokens import ChatTokens
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from pages import KINDS, Block, Box, Page, thousandths

PATCH, MERGE = 14, 2
GROUP = PATCH * MERGE
LEAST_PIXELS, MOST_PIXELS = 4 * GROUP**2, 2048 * GROUP**2
LAYOUT_SIDE = 1036
LEAST_EDGE, MOST_ASPECT = 28, 50
"""MinerU's client enlarges what is thinner than this, and pads what is longer than this many times its width."""
NO_GLYPH = 0
NUMBER, BEGINS, ENDS = range(3)
TARGETS = 3


def step_of(kind: str) -> str:
    """Which of the prompts a block of this kind is read with."""
    return kind if kind in ("table", "equation") else "text"


def layout_answer(page: Page) -> str:
    lines = []
    for block in page.blocks:
        stated = " ".join(f"{side:03d}" for side in thousandths(block.box, page))
        lines.append(f"<|box_start|>{stated}<|box_end|><|ref_start|>{block.kind}<|ref_end|><|rotate_up|>")
    return "\n".join(lines)


@dataclass(frozen=True)
class Cut:
    """A prepared picture and how places of the page become places in it: (x + shift) * scale."""

    picture: Image.Image
    shift: tuple[float, float]
    scale: tuple[float, float]


def cut(picture: Image.Image, box: Box) -> Cut:
    """The part of a page in ``box``, as the client prepares it and the server resizes it."""
    left, top, right, bottom = (round(side) for side in box)
    part = picture.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    x, y = -left, -top
    width, height = part.size
    if max(width, height) > MOST_ASPECT * min(width, height):
        size = (width, math.ceil(width / MOST_ASPECT)) if width > height else (math.ceil(height / MOST_ASPECT), height)
        at = (size[0] - width) // 2, (size[1] - height) // 2
        padded = Image.new(part.mode, size, 255)
        padded.paste(part, at)
        part, x, y = padded, x + at[0], y + at[1]
    before = part.size
    if min(part.size) < LEAST_EDGE:
        grow = LEAST_EDGE / min(part.size)
        part = part.resize((math.ceil(part.width * grow), math.ceil(part.height * grow)), Image.Resampling.BICUBIC)
    part = resized(part)
    return Cut(part, (x, y), (part.width / before[0], part.height / before[1]))


def resized(picture: Image.Image) -> Image.Image:
    """As the server sees it: sides in whole groups of patches."""
    height, width = smart_resize(picture.height, picture.width, GROUP, LEAST_PIXELS, MOST_PIXELS)
    return picture if picture.size == (width, height) else picture.resize((width, height), Image.Resampling.BICUBIC)


@dataclass
class Sample:
    """One question about one picture.

    ``patches`` uint8 [patches, 196], grey, groups of four next to each other; ``places`` int16 [patches, 2]; ``answer``
    token ids with the one that ends them; ``dense`` int16 [patches, 3]: see :func:`glyph_targets` and
    :func:`layout_targets`; ``sides``: how many groups the whole picture has down and across; ``blocks`` int16
    [blocks + 1, 5] of a layout: 1 + kind, and the box as the answer states it, from 1 on, for 0 stands for none.
    """

    step: str
    kind: str
    patches: np.ndarray
    places: np.ndarray
    answer: list[int]
    dense: np.ndarray
    sides: tuple[int, int]
    blocks: np.ndarray | None = None

    def pruned(self) -> "Sample":
        """Without the groups that equal an earlier one."""
        groups = self.patches.reshape(-1, MERGE**2 * PATCH**2)
        _, first = np.unique(groups.view(f"V{groups.shape[1]}"), return_index=True)
        kept = (np.sort(first)[:, None] * MERGE**2 + np.arange(MERGE**2)).ravel()
        return replace(self, patches=self.patches[kept], places=self.places[kept], dense=self.dense[kept])


def patched(picture: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Patches and their places (row, column), as Qwen2-VL orders them."""
    grey = np.asarray(picture)
    down, across = grey.shape[0] // GROUP, grey.shape[1] // GROUP
    split = grey.reshape(down, MERGE, PATCH, across, MERGE, PATCH).transpose(0, 3, 1, 4, 2, 5)
    places = np.indices((down * MERGE, across * MERGE), np.int16).reshape(2, down, MERGE, across, MERGE)
    return split.reshape(-1, PATCH * PATCH), places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


@cache
def character_class(tokens: ChatTokens, character: str) -> int:
    """Its token, if it has one of its own; otherwise none."""
    ids = tokens.ids(character)
    return ids[0] if len(ids) == 1 else NO_GLYPH


def glyph_targets(block: Block, prepared: Cut, tokens: ChatTokens) -> np.ndarray:
    """int16 [rows, columns, 3] of patches: the token of the character whose middle is there (0: none), and of the two
    before it."""
    across, down = (side // PATCH for side in prepared.picture.size)
    targets = np.zeros((down, across, TARGETS), np.int16)
    places = (block.places + prepared.shift) * prepared.scale // PATCH
    seen = ((places >= 0) & (places < (across, down))).all(1)
    classes = np.array([character_class(tokens, glyph) for glyph in block.glyphs], np.int16)
    columns, rows = places[seen].astype(np.int64).T
    for back in range(3):
        before = np.concatenate((np.zeros(back, np.int16), classes))[: len(classes)]
        targets[rows, columns, back] = before[seen]
    return targets


def layout_targets(page: Page) -> np.ndarray:
    """int16 [rows, columns, 3]: the number of the block that covers a patch, from 1 on (0: none), whether one begins
    (its top left corner), whether one ends there. Lines can be thinner than a patch: each block has those of its
    middle."""
    count = LAYOUT_SIDE // PATCH
    height, width = page.picture.shape
    grid = np.zeros((count, count, TARGETS), np.int16)
    boxes = np.array([block.box for block in page.blocks]).reshape(-1, 4) / (width, height, width, height) * count
    places = np.clip(boxes.astype(int), 0, count - 1)
    for number, (x0, y0, x1, y1) in enumerate(places, 1):
        grid[y0 : y1 + 1, x0 : x1 + 1, NUMBER] = number
        grid[y0, x0, BEGINS] = grid[y1, x1, ENDS] = 1
    for number, ((x0, _, x1, _), middle) in enumerate(zip(places, (boxes[:, 1] + boxes[:, 3]) / 2), 1):
        grid[int(middle), x0 : x1 + 1, NUMBER] = number
    return grid


def layout_sample(page: Page, tokens: ChatTokens) -> Sample:
    picture = Image.fromarray(page.picture).resize((LAYOUT_SIDE, LAYOUT_SIDE), Image.Resampling.BICUBIC)
    patches, places = patched(picture)
    blocks = [(0,) * 5, *((1 + KINDS.index(block.kind), *thousandths(block.box, page)) for block in page.blocks)]
    answer = tokens.answer(layout_answer(page))
    dense = layout_targets(page)[tuple(places.T)]
    sides = (LAYOUT_SIDE // GROUP,) * 2
    return Sample("layout", "layout", patches, places, answer, dense, sides, np.array(blocks, np.int16))


def block_sample(page: Page, picture: Image.Image, block: Block, tokens: ChatTokens, dice: Random | None) -> Sample:
    """A block's crop: as the layout answer states its box, or, with ``dice``, as an answer may be off."""
    height, width = page.picture.shape
    box = [side / 1000 * size for side, size in zip(thousandths(block.box, page), (width, height) * 2)]
    if dice is not None:
        slack = [dice.uniform(-0.001, 0.005) * size for size in (width, height) * 2]
        box = [box[0] - slack[0], box[1] - slack[1], box[2] + slack[2], box[3] + slack[3]]
        box = [max(0, box[0]), max(0, box[1]), min(width, box[2]), min(height, box[3])]
    prepared = cut(picture, (box[0], box[1], box[2], box[3]))
    patches, places = patched(prepared.picture)
    dense = glyph_targets(block, prepared, tokens)[tuple(places.T)]
    sides = prepared.picture.height // GROUP, prepared.picture.width // GROUP
    return Sample(step_of(block.kind), block.kind, patches, places, tokens.answer(block.answer), dense, sides)
