"""Calls are recorded with their arguments and their place, and what was watched is left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from recorded_calls import RecordedCalls
from torch import nn


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(2 * x)


def test_calls_within_calls_are_told_apart_and_can_be_made_again():
    module, x = Outer(), torch.ones(1, 2)
    with RecordedCalls() as recorded:
        recorded.watch(module, "forward", "outer")
        recorded.watch(module.inner, "forward", lambda x: "once" if x[0, 0] == 1 else "twice")
        expected = module(x)
        module.inner(x)
    assert {name: len(calls) for name, calls in recorded.parts().items()} == {"outer": 1, "once": 1}
    within = recorded.within("outer")
    assert {name: len(calls) for name, calls in within.items()} == {"once": 1, "twice": 1}
    torch.testing.assert_close(recorded.parts()["outer"][0](), expected)
    torch.testing.assert_close(within["once"][0]() + within["twice"][0](), expected)
    assert not {"forward"} & (vars(module).keys() | vars(module.inner).keys())
    module(x)
    assert len(recorded.parts()["outer"]) == 1
    recorded.forget()
    assert not recorded.parts()


def test_what_a_call_spoils_is_kept_as_it_was_and_a_failed_one_leaves_no_place():
    def spoil(x: torch.Tensor) -> float:
        total = float(x.sum())
        x.zero_()
        if not total:
            raise ValueError("nothing left")
        return total

    place = SimpleNamespace(spoil=spoil)
    with RecordedCalls() as recorded:
        recorded.watch(place, "spoil", "part", torch.clone)
        x = torch.ones(3)
        assert place.spoil(x) == 3.0
        try:
            place.spoil(x)
        except ValueError:
            place.spoil(torch.ones(1))
    assert [call() for call in recorded.parts()["part"][::2]] == [3.0, 1.0]
    assert place.spoil is spoil
