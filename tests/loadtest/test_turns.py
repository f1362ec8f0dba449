"""How sure a ratio of two ways in turns is."""

from __future__ import annotations

from math import log
from statistics import stdev

import pytest
import turns


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
    assert turns.half_interval([1.0, 2.0] * 20) == pytest.approx(2.228 * stdev([1.0, 2.0] * 20) / 40**0.5)
