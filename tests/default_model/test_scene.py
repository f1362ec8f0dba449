"""The scene renderer: labels follow from geometry, hazards can be seen, the held-out set is balanced."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import cv2
import numpy as np
import pytest

from scene import (
    HAZARDS,
    KINDS,
    ORDINARY,
    ask,
    boxes,
    describe,
    encode_jpeg,
    heldout,
    phrasings,
    questions,
    render,
    sample,
)
from scene.geometry import LARGE, bounds, smallest_extent, tile_grid, tile_scale

cv2.setNumThreads(1)
SCENES = [sample(seed, "train") for seed in range(250)]


def of_kind(scene, kind):
    return [item for item in scene.items if item.kind == kind]


def intersection(a, b):
    wide, tall = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(wide, 0.0) * max(tall, 0.0)


def test_equal_seeds_give_equal_scenes_and_questions():
    for scene in SCENES[:40]:
        again = sample.__wrapped__(scene.seed, "train")
        assert again == scene
        assert questions(again) == questions(scene)


def test_splits_never_meet():
    """The same seed means another scene in each split, and no scene of one is in the other."""
    heldout_scenes = {replace(sample(seed, "heldout"), split="", seed=0) for seed in range(250)}
    assert len(heldout_scenes) == 250
    assert not heldout_scenes & {replace(scene, split="", seed=0) for scene in SCENES}
    with pytest.raises(ValueError, match="split"):
        sample(0, "test")


def test_sizes_span_small_to_large_in_many_shapes():
    assert all(min(s.width, s.height) >= 240 and max(s.width, s.height) <= 1920 for s in SCENES)
    assert all(s.width * s.height <= 1920 * 1440 for s in SCENES)
    sizes = {(s.width, s.height) for s in (sample(i, "train") for i in range(900))}
    assert {(320, 240), (1920, 1440)} <= sizes
    shapes = Counter(round(w / h, 2) for w, h in sizes)
    assert {1.33, 1.5, 1.78, 0.75, 0.67, 1.0} <= set(shapes)
    large = sum(max(s.width, s.height) >= LARGE for s in SCENES) / len(SCENES)
    assert 0.3 < large < 0.5


def test_every_hazard_is_present_in_about_a_quarter_of_the_scenes():
    for hazard in HAZARDS:
        assert 0.18 < sum(bool(of_kind(s, hazard)) for s in SCENES) / len(SCENES) < 0.36, hazard
    assert all(len({i.kind for i in s.items} & set(HAZARDS)) <= 3 for s in SCENES)


GRIDS = {(1920, 1440): (4, 3), (1440, 1920): (3, 4), (480, 320): (3, 2), (448, 448): (1, 1), (1920, 1080): (4, 2)}


@pytest.mark.parametrize("size", GRIDS)
def test_tile_grid_follows_the_reference_table(size):
    assert tile_grid(*size) == GRIDS[size]


def test_hazards_are_large_enough_and_inside_the_picture():
    """On the tiles and in the source, the shorter side of the box; foreshortening on side walls included."""
    for scene in SCENES:
        for item in scene.items:
            if item.kind in HAZARDS:
                x0, y0, x1, y1 = item.box
                short = min(x1 - x0, y1 - y0)
                assert short * tile_scale(scene.width, scene.height) >= 24, (scene.seed, item.kind, item.box)
                assert short >= 12
                assert item.extent >= smallest_extent(scene.width, scene.height) * 0.999
                assert 0 <= x0 < x1 <= scene.width and 0 <= y0 < y1 <= scene.height


def test_large_pictures_need_the_tiles():
    """Near half of the hazards of large pictures shrink below 15 pixels when the picture is one tile."""
    shrunk = [
        item.extent * 448 / max(s.width, s.height)
        for s in SCENES
        if max(s.width, s.height) >= LARGE
        for item in s.items
        if item.kind in HAZARDS and item.kind != "blocked exit"
    ]
    assert len(shrunk) > 100
    assert sum(extent < 15 for extent in shrunk) / len(shrunk) > 0.45


def test_labelled_things_are_not_hidden():
    for scene in SCENES:
        for name in HAZARDS + ORDINARY:
            if name in ("rug", "blocked exit"):
                continue
            for item in of_kind(scene, name):
                if name == "door" and of_kind(scene, "blocked exit"):
                    continue
                size = intersection(item.box, item.box)
                nearer = [o for o in scene.items if o.kind not in ("blocked exit", "shadow") and o.order > item.order]
                hidden = sum(intersection(item.box, o.box) for o in nearer) / size
                assert hidden <= 0.25 + 1e-9, (scene.seed, name, hidden)


def test_a_door_is_blocked_or_free_never_between():
    seen = Counter()
    for scene in SCENES:
        for door in of_kind(scene, "door"):
            size = intersection(door.box, door.box)
            before = [intersection(door.box, i.box) / size for i in scene.items if i.plane == "stand"]
            blocked = bool(of_kind(scene, "blocked exit"))
            seen[blocked] += 1
            assert sum(before) > 0.2 if blocked else sum(before) <= 0.02, scene.seed
    assert min(seen[True], seen[False]) > 30


def test_boxes_are_the_items_as_projected():
    for scene in SCENES[:60]:
        named = boxes(scene)
        assert [b[0] for b in named] == [i.kind for i in scene.items if i.kind != "shadow"]
        for item in scene.items:
            x0, y0, x1, y1 = bounds(scene.room, item.origin, item.s, item.t, item.d)
            corners = [scene.room.project(*item.point(s, t, d)) for s in (0, 1) for t in (0, 1) for d in (0, 1)]
            us, vs = zip(*corners, strict=True)
            assert np.allclose((x0, y0, x1, y1), (min(us), min(vs), max(us), max(vs)))


def test_answers_agree_with_the_boxes():
    for scene in SCENES:
        count = Counter(name for name, *_ in boxes(scene))
        for q in questions(scene):
            if q.kind == "presence":
                assert q.answer == ("yes" if count[q.cls] else "no")
            elif q.kind == "count":
                assert q.answer == str(count[q.cls]) and 0 <= int(q.answer) <= 5
            elif q.kind == "hazard":
                present = [h for h in HAZARDS if count[h]]
                assert present == ([q.answer] if q.answer != "none" else [])
            elif q.kind == "position":
                [(_, x0, _, x1, _)] = [b for b in boxes(scene) if b[0] == q.cls]
                third = (x0 + x1) / 2 / scene.width * 3
                assert q.answer == ("left" if third < 1 else "middle" if third < 2 else "right")
            elif q.kind == "colour" and q.cls not in ("wall", "floor"):
                [item] = of_kind(scene, q.cls)
                assert q.answer == item.colour


def test_all_kinds_are_asked_in_many_plain_wordings():
    asked = [q for scene in SCENES for q in questions(scene)]
    assert {q.kind for q in asked} == set(KINDS)
    assert all(re.fullmatch(r"[A-Za-z0-9 ,.:?]+", q.text + q.answer) for q in asked)
    assert all(len(q.answer.split()) <= 2 for q in asked if q.kind != "description")
    assert len(phrasings.PRESENCE) >= 12
    for wordings in (phrasings.HAZARD, phrasings.COUNT, phrasings.COLOUR, phrasings.POSITION, phrasings.DESCRIPTION):
        assert len(set(wordings)) >= 8
    for hazard in HAZARDS:
        texts = {q.text for q in asked if q.kind == "presence" and q.cls == hazard}
        assert len(texts) == len(phrasings.PRESENCE), hazard
    assert ask(SCENES[0], "presence", "crack") in questions(SCENES[0])
    assert ask(SCENES[0], "presence", "unicorn") is None


def test_sockets_are_not_asked_about_beside_a_burnt_one():
    burnt = [scene for scene in SCENES if of_kind(scene, "burnt socket")]
    assert burnt and not any(q.cls == "socket" for scene in burnt for q in questions(scene))


def test_descriptions_have_a_steady_length_and_name_the_hazards():
    for scene in SCENES:
        text = describe(scene)
        assert 30 <= len(re.findall(r"\w+|[.,:]", text)) <= 76, text
        for hazard in HAZARDS:
            assert (hazard in text) == bool(of_kind(scene, hazard))


def test_heldout_is_whole_balanced_and_true():
    items = heldout()
    assert len(items) == 4524
    assert len({item.scene_seed for item in items}) == len(items)
    assert [item.index for item in items] == list(range(4524))
    assert {item.kind for item in items} == set(KINDS)
    answers = Counter((i.cls, i.answer) for i in items if i.kind == "presence" and i.cls in HAZARDS)
    counts = [answers[hazard, answer] for hazard in HAZARDS for answer in ("yes", "no")]
    assert max(counts) - min(counts) <= 1 and 0.6 < sum(counts) / 4524 < 0.7
    start = Counter((i.cls, i.answer) for i in items[:300] if i.kind == "presence" and i.cls in HAZARDS)
    assert all(15 <= start[hazard, answer] <= 18 for hazard in HAZARDS for answer in ("yes", "no"))
    for item in items[::97]:
        scene = sample(item.scene_seed, "heldout")
        assert (scene.width, scene.height) == (item.width, item.height)
        question = ask(scene, item.kind, item.cls)
        assert question is not None and (question.text, question.answer) == (item.question, item.answer)


def test_pictures_repeat_and_jpegs_decode_to_their_size():
    for scene in [s for s in SCENES if s.width * s.height < 500_000][:4]:
        picture = render(scene)
        assert picture.shape == (scene.height, scene.width, 3) and picture.dtype == np.uint8
        assert np.array_equal(picture, render(scene))
        data = encode_jpeg(scene)
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
        assert decoded.shape == picture.shape
        assert np.abs(decoded.astype(int) - picture).mean() < 12


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h != "blocked exit"])
def test_a_hazard_stands_out_from_its_background(hazard):
    """Rendering without it changes its box by at least 35 grey levels on what the hazard covers."""
    scenes = [s for s in SCENES if of_kind(s, hazard) and s.width * s.height < 400_000]
    assert len(scenes) >= 8
    for scene in scenes[:8]:
        gone = replace(scene, items=tuple(i for i in scene.items if i.kind != hazard))
        change = np.abs(render(scene).astype(int) - render(gone)).max(2)
        for item in of_kind(scene, hazard):
            x0, y0, x1, y1 = (int(v) for v in item.box)
            inside = change[y0 : y1 + 1, x0 : x1 + 1]
            assert np.percentile(inside, 93) >= 35, (scene.seed, np.percentile(inside, 93))
            change[max(y0 - 12, 0) : y1 + 13, max(x0 - 12, 0) : x1 + 13] = 0
        assert np.percentile(change, 99) < 35  # nothing else of the picture depends on it, but for its shadow
