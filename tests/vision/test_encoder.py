"""Batching: tiles of many requests share forwards, rows come back to the request they belong to."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera.errors import ConfigError, InvalidRequest
from tessera.settings.stages import VisionSettings
from tessera.vision import encoder as encoding
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import EmbeddingCache
from tessera.vision.pictures import VisionItem

SIDE, TOKENS = 2, 3


class TileFamily:
    """Pictures of small tiles in a row: the wire is (tiles, 1, tiles)."""

    cost_unit, unit_shape, for_less = "tiles", (SIDE, SIDE, 3), "send less"

    def plan_of(self, wire):
        tiles, rows, columns = wire
        if rows != 1 or columns != tiles or tiles < 1:
            raise InvalidRequest(f"{tiles} tiles are no row of {columns}")
        return SimpleNamespace(tokens=TOKENS * tiles, cost=tiles, views=(), pixel_bytes=tiles * SIDE * SIDE * 3)


class CountingRunner:
    """Rows say which tile they came from: the tile's first byte, then the row's number."""

    beside = 0

    def __init__(self, splits=True):
        self.batches = []
        self.wires = []
        self.tower = SimpleNamespace(splits=splits)

    def run(self, tiles, wires=()):
        self.wires.append(list(wires))
        assert tiles.dtype == np.uint8
        assert tiles.shape[1:] == (SIDE, SIDE, 3)
        self.batches.append(len(tiles))
        first = torch.from_numpy(tiles[:, 0, 0, 0].astype(np.float32))
        rows = torch.stack([first[:, None].expand(-1, TOKENS), torch.arange(TOKENS).expand(len(tiles), -1)], dim=-1)
        return rows.flatten(0, 1)

    def activation_bytes(self, tiles):
        return 0


def item(*pictures, side=SIDE):
    """One request; each picture is a list of tile numbers. Equal pictures get equal digests."""
    tiles = [np.full((side, side, 3), number, np.uint8) for picture in pictures for number in picture]
    pixels = np.concatenate([tile.ravel() for tile in tiles]) if tiles else np.empty(0, np.uint8)
    plan = np.array([[0, len(picture), 1, len(picture)] for picture in pictures], np.int32).ravel()
    digest = np.array([[sum(1 << n for n in picture), len(picture)] for picture in pictures], np.int64).ravel()
    return VisionItem(pixels, plan, digest)


def tiles_of(rows):
    assert rows[:, 1].tolist() == list(range(TOKENS)) * (len(rows) // TOKENS)
    return rows[::TOKENS, 0].int().tolist()


def encoder(batch=4, cache=0, splits=True, **more):
    cache = EmbeddingCache(cache, 2, torch.float32)
    return VisionEncoder(CountingRunner(splits), TileFamily(), infer_batch_size=batch, cache=cache, **more)


def test_big_requests_are_split_and_small_ones_merged():
    vision = encoder(batch=4)
    rows = vision.encode([item([1, 2, 3, 4, 5, 6]), item(), item([7]), item([8, 9], [10])])
    assert vision.runner.batches == [4, 4, 2]
    assert rows[1] is None
    assert [tiles_of(rows[i]) for i in (0, 2, 3)] == [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 64])
def test_every_batch_size_gives_the_same_rows(batch):
    requests = [item([1, 2, 3]), item([4]), item([5, 6], [7, 8, 9, 10]), item([11])]
    vision = encoder(batch)
    rows = vision.encode(requests)
    assert [tiles_of(r) for r in rows] == [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11]]
    assert max(vision.runner.batches) <= batch
    assert sum(vision.runner.batches) == 11
    assert all(count == batch for count in vision.runner.batches[:-1])


def test_a_tower_that_needs_a_picture_whole_gets_it_whole():
    """A forward's cost is bounded by 4; one picture alone may cost up to 6."""
    vision = encoder(batch=4, splits=False, largest_picture=6)
    rows = vision.encode([item([1, 2, 3]), item([4, 5]), item([6, 7, 8, 9, 10, 11], [12]), item([13])])
    assert vision.runner.batches == [3, 2, 6, 1, 1]
    assert vision.runner.wires == [[(3, 1, 3)], [(2, 1, 2)], [(6, 1, 6)], [(1, 1, 1)], [(1, 1, 1)]]
    assert [tiles_of(r) for r in rows] == [[1, 2, 3], [4, 5], [*range(6, 12), 12], [13]]
    with pytest.raises(InvalidRequest, match="picture 1 costs 7 tiles; the vision tower takes at most 6 at once"):
        vision.encode([item([1], list(range(2, 9)))])
    assert encoder(batch=7, splits=False, largest_picture=6).encode([item(list(range(2, 9)))])[0] is not None


def test_large_pictures_that_stay_whole_do_not_wait_for_more_than_half_of_the_others():
    """Down to a quarter of a forward's 16."""
    vision = encoder(batch=16, splits=False)
    vision.encode([item([3 * number + unit for unit in range(3)]) for number in range(12)])
    assert vision.runner.batches == [15, 9, 6, 3, 3]
    vision.encode([item([40 + number]) for number in range(20)])
    assert vision.runner.batches[5:] == [16, 4]


def test_towers_that_split_are_told_nothing_of_pictures():
    vision = encoder(batch=4)
    vision.encode([item([1, 2, 3]), item([4, 5])])
    assert vision.runner.wires == [[], []]


def test_a_request_is_answered_before_later_forwards_run():
    vision = encoder(batch=2)
    launched = vision.launch([item([1, 2, 3]), item([4]), item(), item([5])])
    assert [(each.index, len(vision.runner.batches)) for each in launched] == [(2, 0), (0, 2), (1, 2), (3, 3)]


def test_pixels_are_joined_while_the_forward_before_is_under_way(monkeypatch):
    vision, order = encoder(batch=2), []
    joined, run = encoding.joined, vision.runner.run
    monkeypatch.setattr(
        encoding, "joined", lambda *args, **options: (order.append("join"), joined(*args, **options))[1]
    )
    monkeypatch.setattr(vision.lane, "wait_idle", lambda: order.append("wait"))
    vision.runner.run = lambda *args: (order.append("run"), run(*args))[1]
    for _ in vision.launch([item([1, 2, 3]), item([4])], before_forward=lambda: order.append("pass")):
        pass
    assert order == ["join", "pass", "wait", "run"] * 2


def test_equal_pictures_of_one_call_are_computed_once():
    vision = encoder()
    rows = vision.encode([item([1, 2]), item([1, 2]), item([3], [1, 2], [3])])
    assert sum(vision.runner.batches) == 3
    assert [tiles_of(r) for r in rows] == [[1, 2], [1, 2], [3, 1, 2, 3]]


def test_the_cache_remembers_across_calls_and_forgets_the_least_recently_used():
    picture_bytes = TOKENS * 2 * 4
    vision = encoder(cache=2 * picture_bytes)
    for picture in ([1], [2], [1], [3], [1], [2]):
        assert tiles_of(vision.encode([item(picture)])[0]) == picture
    # 1, 2 computed; 1 found; 3 pushes 2 out; 1 found; 2 computed again.
    assert len(vision.runner.batches) == 4
    assert vision.cache.used_bytes == 2 * picture_bytes


def test_without_a_cache_nothing_is_kept():
    vision = encoder(cache=0)
    vision.encode([item([1])])
    vision.encode([item([1])])
    assert len(vision.runner.batches) == 2
    assert vision.cache.used_bytes == 0


def test_the_same_digest_under_another_plan_is_another_picture():
    vision = encoder(cache=1 << 20)
    one, two = item([1]), item([1, 2])
    two = VisionItem(two.pixels, two.plan, one.digest)
    assert tiles_of(vision.encode([one])[0]) == [1]
    assert tiles_of(vision.encode([two])[0]) == [1, 2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(pixels=np.zeros(5, np.uint8)), "PIXELS has 5 bytes; the plan needs 12"),
        (dict(pixels=np.zeros(13, np.uint8)), "PIXELS has 13 bytes"),
        (dict(plan=np.array([0, 1, 2], np.int32)), "PLAN has 3 values"),
        (dict(plan=np.array([1, 1, 1, 1], np.int32)), "picture 0 is encoded"),
        (dict(plan=np.array([2, 1, 1, 1], np.int32)), "picture 0 is of kind 2"),
        (dict(plan=np.array([0, 1, 2, 4], np.int32)), "picture 0: 1 tiles are no row of 4"),
        (dict(plan=np.array([0, -1, 1, -1], np.int32)), "picture 0: -1 tiles"),
        (dict(digest=np.zeros(1, np.int64)), "DIGEST has 1 values"),
    ],
)
def test_disagreeing_tensors_are_refused(change, complaint):
    good = item([1])
    values = {name: change.get(name, getattr(good, name)) for name in ("pixels", "plan", "digest")}
    with pytest.raises(InvalidRequest, match=complaint):
        encoder().encode([VisionItem(**values)])


@pytest.mark.parametrize(
    "settings",
    [
        {"runner": "tensorflow"},
        {"dtype": "int8"},
        {"runner": "onnx", "dtype": "bfloat16"},
        {"infer_batch_size": 0},
        {"memory_bytes": -1},
    ],
)
def test_contradictory_settings(settings):
    with pytest.raises(ConfigError):
        VisionSettings(**settings)
