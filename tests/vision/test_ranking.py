"""Who goes first: how long a better priority is expected."""

from __future__ import annotations

from tessera.prompt.sampling import EXPECTED_NS, Expected


def test_a_better_priority_is_expected_for_a_while_after_its_last_request():
    expected = Expected()
    assert not expected.above(10)
    expected.saw(10, 0)
    assert not expected.above(10) and expected.above(11)
    expected.saw(0, 1)
    expected.saw(10, 1 + EXPECTED_NS)
    assert expected.above(10) and not expected.above(0)
    expected.saw(10, 2 + EXPECTED_NS)
    assert not expected.above(10)
