"""What stands around the encoder and its scheduler in tests: a family, a runner, a decoder, jobs and their pictures."""

from types import SimpleNamespace

import numpy as np
import torch

from tessera.errors import InvalidRequest
from tessera.models.family import EncodedPicture, ImagePlan, View
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import EmbeddingCache
from tessera.vision.pictures import VisionItem

SIDE, TOKENS = 2, 3
BYTES = TOKENS * 2 * 4  # of a tile's rows


class TileFamily:
    """Pictures of tiles of SIDE pixels; the wire is (tiles, rows, columns)."""

    cost_unit, unit_shape, reduce_hint = "tiles", (SIDE, SIDE, 3), "send less"

    def plan_of(self, wire):
        tiles, rows, columns = wire
        if rows < 1 or tiles != rows * columns:
            raise InvalidRequest(f"{tiles} tiles are not a grid of {columns}x{rows}")
        views = (View(columns * SIDE, rows * SIDE, (), ()),)
        return ImagePlan(TOKENS * tiles, tiles, wire, views)

    def last_part(self, plan):
        return None


class TileRunner:
    """Rows say which tile they came from: the tile's first byte, then the row's number. Notes the tiles and the wires
    of each forward, and calls ``during`` with the number of forwards so far; tile 50 melts the card."""

    def __init__(self, splits=True, beside=0, during=lambda number: None):
        self.forwards, self.wires, self.during = [], [], during
        self.tower, self.beside = SimpleNamespace(splits=splits), beside

    @property
    def batches(self):
        return [len(tiles) for tiles in self.forwards]

    def run(self, tiles, wires=()):
        pixels = torch.as_tensor(tiles)
        assert pixels.dtype == torch.uint8 and pixels.shape[1:] == (SIDE, SIDE, 3)
        first = pixels[:, 0, 0, 0]
        if 50 in first:
            raise RuntimeError("the card melted")
        self.forwards.append(first.tolist())
        self.wires.append(list(wires))
        self.during(len(self.forwards))
        rows = first.float()[:, None].expand(-1, TOKENS), torch.arange(TOKENS).expand(len(tiles), -1)
        return torch.stack(rows, dim=-1).flatten(0, 1)


class TileDecoder:
    """A file's bytes are its tiles' numbers; a zero is damage, and 255 too much for the decoder itself. Takes two
    pictures at once; ``count``: of those it has decoded."""

    count = 0

    def check(self, undecoded):
        pass

    def pixels(self, line):
        if 255 in line[0][0].data:
            raise RuntimeError("the decoder itself failed")
        taken = [picture.data for picture, _ in line[:2] if 255 not in picture.data]
        self.count += len(taken)
        return [
            torch.from_numpy(tiles.repeat(SIDE * SIDE * 3)) if tiles.all() else InvalidRequest("damaged")
            for tiles in taken
        ]


def flat(groups):
    return [each for group in groups for each in group]


def frame(*tiles):
    return EncodedPicture(np.array(tiles, np.uint8), 640, 480, 6).framed()


def item(*pictures, encoded=False):
    """One request; each picture is a list of tile numbers, as pixels, or ``encoded`` (a truth for each, or for all).
    Equal pictures get equal digests."""
    kinds = encoded if isinstance(encoded, list) else [encoded] * len(pictures)
    pixels = [
        frame(*tiles) if kind else np.repeat(np.array(tiles, np.uint8), SIDE * SIDE * 3)
        for tiles, kind in zip(pictures, kinds, strict=True)
    ]
    plan = [[int(kind), len(tiles), 1, len(tiles)] for tiles, kind in zip(pictures, kinds, strict=True)]
    digest = [[hash(tuple(tiles)), len(tiles)] for tiles in pictures]
    return VisionItem(
        np.concatenate([np.empty(0, np.uint8), *pixels]),
        np.array(plan, np.int32).ravel(),
        np.array(digest, np.int64).ravel(),
    )


def tiles_of(rows):
    """The tiles that some rows came from, all of each."""
    if rows is None:
        return None
    assert rows[:, 1].tolist() == list(range(TOKENS)) * (len(rows) // TOKENS)
    return rows[::TOKENS, 0].int().tolist()


def encoder(batch=4, cache=0, runner=None, **more):
    """``cache``: for that many tiles' rows."""
    kept = EmbeddingCache(cache * BYTES, 2, torch.float32)
    return VisionEncoder(runner or TileRunner(), TileFamily(), batch, kept, **more)


class Job:
    """What a stage's job is to the scheduler, with the order of all answers: (number, tiles or the error)."""

    deadline_ns = since_ns = 0

    def __init__(self, number, pictures, answers, priority=0):
        self.number, self.item, self.answers, self.priority = number, item(*pictures), answers, priority

    def begin(self):
        pass

    def answer(self, rows):
        self.answers.append((self.number, tiles_of(rows)))

    def fail(self, error):
        self.answers.append((self.number, error))
