"""What the scheduler decides stays as it was: 10,000 simulated steps, and another digest for any rule that changes."""

import json

import decisions


def test_the_first_steps_of_each_mix_are_decided_as_before():
    stored = json.loads(decisions.STORED.read_text())
    found = decisions.decided(quick=True)
    again = "python tests/engine/decisions.py --write takes today's decisions, where that is what was wanted"
    assert found.keys() <= stored.keys() and found == {name: stored[name] for name in found}, again
