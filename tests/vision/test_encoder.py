"""Batching: tiles of many requests share forwards, rows come back to the request they belong to."""

import time
import weakref

import numpy as np
import pytest
import torch
from vision_fakes import BYTES, Job, TileRunner, encoder, flat, item, tiles_of

from tessera.errors import ConfigError, InvalidRequest
from tessera.kernels import tower_attention
from tessera.kernels.operands import HopperPlan
from tessera.settings.stages import VisionSettings
from tessera.vision.memory import RowBudget
from tessera.vision.pictures import VisionItem
from tessera.vision.scheduler import VisionScheduler

# Pictures' tiles a request: big ones to be split, small ones to be merged, one without pictures, two with several.
REQUESTS = [[[1, 2, 3]], [[4]], [], [[5]], [[6], [7, 8]], [[9]], [[10, 11, 12, 13, 14]], [[15]], [[16]], [[17], [18]]]
TILES = 18


@pytest.mark.parametrize("infer", [1, 2, 3, 5, 8, 32])
def test_everyone_is_answered_once_whatever_the_sizes(infer):
    vision = encoder(infer)
    rows = vision.encode([item(*pictures) for pictures in REQUESTS])
    assert [tiles_of(each) for each in rows] == [flat(pictures) or None for pictures in REQUESTS]
    # Forwards are as large as they may be, but for the last; towers that split are told nothing of pictures.
    assert vision.runner.batches == [infer] * (TILES // infer) + ([TILES % infer] if TILES % infer else [])
    assert not any(vision.runner.wires)


@pytest.mark.parametrize(
    ("infer", "forwards"),
    [
        (1, [0, 3, 4, 5, 8, 9, 14, 15, 16, 18]),  # each goes out with its last tile; without pictures at once
        (8, [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]),  # forwards end after tiles 8, 16 and 18
        (32, [0] + [1] * 9),  # all in one forward, still one by one
    ],
)
def test_forwards_are_cut_and_requests_go_out_independently(infer, forwards):
    vision = encoder(infer)
    launched = vision.launch([item(*pictures) for pictures in REQUESTS])
    found = [(pending.index, len(vision.runner.batches)) for pending in launched]
    assert found == list(zip([2, 0, 1, 3, 4, 5, 6, 7, 8, 9], forwards, strict=True))


def test_what_launching_takes_is_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    vision = encoder(8, runner=TileRunner(during=lambda number: now.append(now.pop() + 2.0)))
    vision.encode([item(*pictures) for pictures in REQUESTS])
    assert vision.launching_s == 2.0 * len(vision.runner.batches)


@pytest.mark.parametrize(("busy", "programs"), [(True, [132, 132, 92]), (False, [132, 132, 132])])
def test_forwards_that_are_not_full_leave_room_to_a_busy_engine(busy, programs, monkeypatch):
    found = []
    attention = lambda query, key, value, tiles, plan: found.append(plan.programs)  # noqa: E731
    monkeypatch.setattr(tower_attention, "attention_by", lambda plan: attention)
    rows = torch.zeros(1, 1, 16)

    def attend(number):
        tower_attention.attend_in_triton([1], torch.device("cpu"), HopperPlan(132))(rows, rows, rows)

    vision = encoder(8, runner=TileRunner(during=attend))
    vision.engine_busy = lambda: busy
    vision.encode([item(*pictures) for pictures in REQUESTS])
    assert vision.runner.batches == [8, 8, 2] and found == programs


@pytest.mark.parametrize("infer", [1, 8, 32])
@pytest.mark.parametrize("at", [1, 8, 14, 18])
def test_an_error_in_the_middle_ends_the_rest_and_keeps_what_was_done(infer, at):
    budget, runner, answers = RowBudget(BYTES, TILES * BYTES), TileRunner(), []
    scheduler = VisionScheduler(encoder(infer, runner=runner, budget=budget))
    requests = [[[50 if tile == at else tile for tile in tiles] for tiles in pictures] for pictures in REQUESTS]
    scheduler.encode([Job(number, pictures, answers) for number, pictures in enumerate(requests)])
    scheduler.close()
    done = {tile for forward in runner.forwards for tile in forward}
    assert sorted(number for number, _ in answers) == list(range(len(REQUESTS)))
    for number, outcome in answers:
        tiles = flat(requests[number])
        assert outcome == (tiles or None) if done.issuperset(tiles) else str(outcome) == "the card melted"
    assert budget.used_bytes == 0 and 50 not in done


def test_a_tower_that_needs_a_picture_whole_gets_it_whole():
    """A forward's cost is bounded by 4; one picture alone may cost up to 6."""
    vision = encoder(4, runner=TileRunner(splits=False), largest_picture=6)
    rows = vision.encode([item([1, 2, 3]), item([4, 5]), item([6, 7, 8, 9, 10, 11], [12]), item([13])])
    assert vision.runner.wires == [[(3, 1, 3)], [(2, 1, 2)], [(6, 1, 6)], [(1, 1, 1)], [(1, 1, 1)]]
    assert [tiles_of(r) for r in rows] == [[1, 2, 3], [4, 5], [*range(6, 12), 12], [13]]
    with pytest.raises(InvalidRequest, match="picture 1 costs 7 tiles; the vision tower takes at most 6 at once"):
        vision.encode([item([1], list(range(2, 9)))])
    assert encoder(7, runner=TileRunner(splits=False), largest_picture=6).encode([item(list(range(2, 9)))])


@pytest.mark.parametrize(("splits", "forwards"), [(True, [1] * 5), (False, [3, 2])])
def test_each_tile_or_whole_picture_may_have_a_forward_for_itself(splits, forwards):
    vision = encoder(16, runner=TileRunner(splits), alone=True)
    assert [tiles_of(rows) for rows in vision.encode([item([1, 2, 3], [4, 5])])] == [[1, 2, 3, 4, 5]]
    assert vision.runner.batches == forwards


def test_large_pictures_that_stay_whole_do_not_wait_for_more_than_half_of_the_others():
    """Down to a quarter of a forward's 16."""
    vision = encoder(16, runner=TileRunner(splits=False))
    vision.encode([item([3 * number + unit for unit in range(3)]) for number in range(12)])
    vision.encode([item([60 + number]) for number in range(20)])
    assert vision.runner.batches == [15, 9, 6, 3, 3, 16, 4]


def test_equal_pictures_of_one_call_are_computed_once():
    vision = encoder()
    rows = vision.encode([item([1, 2]), item([1, 2]), item([3], [1, 2], [3])])
    assert vision.runner.forwards == [[1, 2, 3]] and vision.computed == 2
    assert [tiles_of(r) for r in rows] == [[1, 2], [1, 2], [3, 1, 2, 3]]


@pytest.mark.parametrize(("cache", "computed"), [(2, [1, 2, 3, 2]), (0, [1, 2, 1, 3, 1, 2])])
def test_the_cache_remembers_across_calls_and_forgets_the_least_recently_used(cache, computed):
    """1, 2 computed; 1 found; 3 pushes 2 out; 1 found; 2 computed again."""
    vision = encoder(cache=cache)
    for picture in ([1], [2], [1], [3], [1], [2]):
        assert tiles_of(vision.encode([item(picture)])[0]) == picture
    assert flat(vision.runner.forwards) == computed
    assert vision.cache.used_bytes == cache * BYTES


def test_rows_are_gone_when_their_bytes_are_given_to_the_next_wave():
    vision = encoder(1, budget=RowBudget(BYTES, 2 * BYTES))
    read, seen, living = vision.pictures, [], []
    vision.pictures = lambda item: [seen.append(weakref.ref(picture)) or picture for picture in read(item)]
    for pending in vision.launch([item([number]) for number in range(1, 7)]):
        with pending.rows():
            pass
        del pending
        living.append(sum((picture := ref()) is not None and picture.rows is not None for ref in seen))
        del picture
    assert len(living) == len(seen) == 6 and max(living) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(pixels=np.zeros(5, np.uint8)), "PIXELS has 5 bytes; the plan needs 12"),
        (dict(pixels=np.zeros(13, np.uint8)), "PIXELS has 13 bytes"),
        (dict(plan=np.array([0, 1, 2], np.int32)), "PLAN has 3 values"),
        (dict(plan=np.array([1, 1, 1, 1], np.int32)), "picture 0 is encoded.* set gpu_pixels for both stages or neit"),
        (dict(plan=np.array([3, 1, 1, 1], np.int32)), "picture 0 is of kind 3"),
        (dict(plan=np.array([0, 1, 2, 4], np.int32)), "picture 0: 1 tiles are not a grid of 4x2"),
        (dict(plan=np.array([0, 1, -1, -1], np.int32)), "picture 0: 1 tiles"),
        (dict(digest=np.zeros(1, np.int64)), "DIGEST has 1 values"),
    ],
)
def test_disagreeing_tensors_are_refused(change, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        encoder().encode([VisionItem(**vars(item([1])) | change)])


@pytest.mark.parametrize(
    "settings",
    [
        {"runner": "tensorflow"},
        {"runner": "graph"},  # which needs device cuda
        {"dtype": "int8"},
        {"runner": "onnx", "device": "cuda"},
        {"quantization": "int8", "dtype": "bfloat16"},
        {"infer_batch_size": 0},
        {"memory_bytes": -1},
        {"quantization": "int4"},
    ],
    ids=str,
)
def test_contradictory_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        VisionSettings(**settings)
