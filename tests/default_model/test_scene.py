"""The scene renderer: labels follow from geometry, hazards can be seen, the held-out set is balanced."""

from __future__ import annotations

import hashlib
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
from scene.geometry import smallest_extent, tile_scale

cv2.setNumThreads(1)
SCENES = [sample(seed, "train") for seed in range(250)]


def of_kind(scene, kind):
    return [item for item in scene.items if item.kind == kind]


def intersection(a, b):
    wide, tall = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(wide, 0.0) * max(tall, 0.0)


def test_scenes_are_those_that_the_checkpoint_was_trained_on():
    """Labels of both splits, in whole pixels: equal for every OpenCV and libm."""
    digest = hashlib.sha256()
    for scene in (*SCENES, *(sample(seed, "heldout") for seed in range(50))):
        things = [(name, *map(round, box)) for name, *box in boxes(scene)]
        told = [(q.text, q.answer) for q in questions(scene)]
        digest.update(repr((scene.width, scene.height, things, told, describe(scene))).encode())
    assert digest.hexdigest()[:16] == "bb23c8aee3759e11"


def test_splits_never_meet():
    """The same seed means another scene in each split, and no scene of one is in the other."""
    heldout_scenes = {replace(sample(seed, "heldout"), split="", seed=0) for seed in range(250)}
    assert len(heldout_scenes) == 250
    assert not heldout_scenes & {replace(scene, split="", seed=0) for scene in SCENES}
    with pytest.raises(ValueError, match="split"):
        sample(0, "test")


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
