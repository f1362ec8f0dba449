"""The picture of a run's requests: each bar as long as the request took, and what the slowest waited for."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import timeline
from closed_loop import Answered

STAGES = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)


def answer(began: float, seconds: float = 0.25, stages: tuple[float, ...] = STAGES) -> Answered:
    return Answered(began + seconds, seconds, None, 4, 1, stages)


def bars(svg: str) -> dict[str, list[tuple[float, float, float]]]:
    """Stage -> (x, y, width) of its pieces."""
    root = ElementTree.fromstring(svg)
    paths = {path.get("id"): path.get("d") for path in root.iter("{http://www.w3.org/2000/svg}path")}
    return {
        name: [tuple(map(float, piece)) for piece in re.findall(r"M([\d.]+) ([\d.]+)h([\d.e+-]+)", paths[name])]
        for name in timeline.COLOURS
    }


def test_a_bar_is_as_long_as_its_request_and_bars_lie_in_the_order_of_their_starts():
    drawn = bars(timeline.picture([answer(3.5), answer(3.0, 0.5), answer(3.25)], "W1 <bf16>"))
    scale = (timeline.WIDTH - timeline.LEFT - 20) / 0.75
    first = [[pieces[row] for pieces in drawn.values()] for row in range(3)]
    for row, (start, seconds) in zip(first, [(3.0, 0.5), (3.25, 0.25), (3.5, 0.25)]):
        assert row[0][0] == pytest.approx(timeline.LEFT + scale * (start - 3.0), abs=0.06)
        assert sum(width for *_, width in row) == pytest.approx(scale * seconds, abs=0.4)
        for (x, y, width), (following, same, _) in pairwise(row):
            assert following == pytest.approx(x + width, abs=0.16) and same == y
    assert first[0][0][1] < first[1][0][1] < first[2][0][1]
    assert drawn["decode"][1][2] == pytest.approx(scale * 0.06, abs=0.06)
    assert drawn["around"][0][2] == pytest.approx(scale * 0.29, abs=0.06)
