"""How sure a ratio of two ways in turns is, and a product of such; and when it is sure enough."""

from math import log
from statistics import stdev

import counting
import pytest
import turns
from turns import Comparison, Ratio


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (5, 2.776), (16, 2.131), (17, 2.120), (31, 2.042), (61, 2.000)])
def test_student_s_t(count: int, t: float):
    assert counting.student(count) == pytest.approx(t, abs=0.004)


def test_a_drift_that_falls_on_both_ways_leaves_the_ratio_sure() -> None:
    below = [10.0, 20.0, 40.0]
    found = turns.ratio([2 * rate for rate in below], below)
    assert found == (pytest.approx(2.0), pytest.approx(0.0, abs=1e-9)) and found.sure
    assert turns.ratio([1.0, 1.0], [2.0, 2.0]).value == pytest.approx(0.5)


def test_the_interval_is_students_of_the_logarithms() -> None:
    found = turns.ratio([11.0, 10.0, 10.5], [10.0, 10.0, 10.0])
    half = 4.303 * stdev([log(1.1), 0.0, log(1.05)]) / 3**0.5
    assert found.value == pytest.approx((1.1 * 1.05) ** (1 / 3))
    assert found.ci95 == pytest.approx(found.value * half, rel=0.01) and not found.sure
    assert found.share == pytest.approx(half, rel=0.01)


def test_a_chain_adds_errors_in_squares():
    found = turns.chained([Ratio(2.0, 0.06), Ratio(1.5, 0.06)])
    assert found.value == pytest.approx(3)
    assert found.share == pytest.approx(0.05, rel=1e-2)  # of 0.03 and 0.04
    assert turns.chained([Ratio(2.0, 0.06)]).ci95 == pytest.approx(0.06)


def test_comparisons_take_turns_and_leave_at_their_goal():
    asked: list[tuple[str, int]] = []

    def way(name: str, *told: float):
        def ask(seed: int) -> float:
            asked.append((name, seed))
            return told[sum(each == name for each, _ in asked) % len(told)]

        return ask

    steady = Comparison(way("b", 4.0), way("a", 2.0), float)
    noisy = Comparison(way("d", 1.0, 3.0), way("c", 1.0), float)
    turns.compare({"steady": steady, "noisy": noisy}, seconds=0.0)
    assert "".join(name for name, _ in asked) == "acbddbca"  # no time: two turns, for an interval
    assert asked[0][1] == asked[2][1] != asked[1][1] == asked[3][1]
    assert noisy.ratio.share > 1

    steady.turns.clear()
    turns.compare({"steady": steady}, seconds=60.0)
    assert len(steady.turns) == turns.LEAST and steady.ratio == Ratio(2.0, 0.0)


def test_a_way_that_comparisons_share_is_asked_once_a_turn_with_the_same_pictures():
    asked: list[tuple[str, int]] = []

    def way(name: str, told: float):
        return lambda seed: asked.append((name, seed)) or told

    a, b, c, d = way("a", 1.0), way("b", 2.0), way("c", 6.0), way("d", 12.0)
    compared = {"d": Comparison(d, c, float), "b": Comparison(b, a, float), "c": Comparison(c, b, float)}
    turns.compare(compared, seconds=0.0)
    assert "".join(name for name, _ in asked) == "cabddbac"
    assert {name: each.ratio.value for name, each in compared.items()} == pytest.approx({"d": 2, "b": 2, "c": 3})
