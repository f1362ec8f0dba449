"""Locust's shapes: how many users there are when."""

from __future__ import annotations

import pytest
from user_shapes import SECONDS, users_at

MOST = 40
SHARES = [step / 20 for step in range(21)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("steady", [40] * 21),
        ("soak", [40] * 21),
        ("mix", [40] * 21),
        ("ramp", [1, 2, 5, 8, 10, 12, 15, 18, 20, 22, 25, 28, 30, 32, 35, 38, 40, 40, 40, 40, 40]),
        ("spike", [10] * 8 + [40] * 4 + [10] * 9),
    ],
)
def test_users_by_the_share_of_the_run(shape: str, expected: list[int]) -> None:
    assert [users_at(shape, share, MOST) for share in SHARES] == expected


def test_there_is_always_a_user_and_never_more_than_said() -> None:
    assert {users_at(shape, share, 1) for shape in SECONDS for share in SHARES} == {1}
    assert all(SECONDS[shape] for shape in ("ramp", "spike", "soak"))  # whose users go by a share of something
