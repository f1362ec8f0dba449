"""The scene renderer: labels follow from geometry, hazards can be seen, the held-out set is balanced."""

import hashlib
from collections import Counter
from dataclasses import replace

import cv2
import numpy as np
import pytest

from scene import HAZARDS, ask, boxes, describe, encode_jpeg, heldout, questions, render, sample

cv2.setNumThreads(1)
SCENES = [sample(seed, "train") for seed in range(250)]


def of_kind(scene, kind):
    return [item for item in scene.items if item.kind == kind]


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
    heldout_scenes = {replace(sample(seed, "heldout"), split="", seed=0) for seed in range(50)}
    assert not heldout_scenes & {replace(scene, split="", seed=0) for scene in SCENES}
    with pytest.raises(ValueError, match="split"):
        sample(0, "test")


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


def test_heldout_is_whole_balanced_and_true():
    items = heldout(1206)  # 67 rounds; the others follow from the same seeds
    answers = Counter((i.cls, i.answer) for i in items if i.kind == "presence" and i.cls in HAZARDS)
    counts = [answers[hazard, answer] for hazard in HAZARDS for answer in ("yes", "no")]
    assert len(items) == 1206 and max(counts) - min(counts) <= 1
    assert hashlib.sha256(repr(items).encode()).hexdigest()[:16] == "46217145409edb04"
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
