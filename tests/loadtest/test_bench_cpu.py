"""What the CPU bench asks: distinct pictures, and four questions a picture one after the other."""

from __future__ import annotations

import itertools

import pytest
from bench import cpu as bench_cpu


@pytest.fixture
def pictures(monkeypatch):
    """Three held-out items with stand-ins for their pictures: drawing takes seconds."""
    import scene

    items = [item for item in scene.heldout(40) if item.kind != "description"][:3]
    found = [(item, f"picture {item.index}".encode()) for item in items]
    monkeypatch.setattr(bench_cpu, "heldout_pictures", lambda count: found[:count])
    return found


def test_distinct_pictures_have_a_question_each(pictures):
    assert bench_cpu.distinct(3) == [(picture, item.question) for item, picture in pictures]


def test_the_four_questions_of_a_picture_follow_each_other_and_differ(pictures):
    work = bench_cpu.four_questions(2)
    groups = [list(group) for _, group in itertools.groupby(work, key=lambda job: job[0])]
    assert [group[0][0] for group in groups] == [picture for _, picture in pictures[:2]]
    for group in groups:
        assert len({question for _, question in group}) == 4
