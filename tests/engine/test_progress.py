"""Tokens are gathered so that text is made once for several: none late, none lost, none twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_fakes import make_request

from tessera.engine.progress import HOLD_S, MOST_TOKENS, Gatherer, Progress
from tessera.engine.request import Usage
from tessera.engine.sequence import SampledToken


class Answer:
    """A request of which one token after the other becomes known."""

    def __init__(self, stream=True, **sampling):
        self.request = replace(make_request([1], max_tokens=100, **sampling), stream=stream)
        self.count = 0

    def token(self, reason=None):
        self.count += 1
        return Progress(self.request, Usage(1, self.count, 0), (SampledToken(self.count),), reason)

    def end(self, reason):
        return Progress(self.request, Usage(1, self.count, 0), (), reason)


@pytest.fixture
def parts():
    clock = [0.0]
    return Gatherer(lambda: clock[0]), clock


def ids(due):
    return [[token.token_id for token in progress.tokens] for progress in due]


def test_the_first_token_goes_at_once_and_later_ones_when_enough_are_there(parts):
    gatherer, _ = parts
    answer = Answer()
    assert ids(gatherer.add([answer.token()])) == [[1]]
    for _ in range(MOST_TOKENS - 1):
        assert gatherer.add([answer.token()]) == []
    (due,) = gatherer.add([answer.token()])
    assert ids([due]) == [list(range(2, MOST_TOKENS + 2))]
    assert due.usage.completion_tokens == MOST_TOKENS + 1
    assert gatherer.wait_s() is None


def test_held_tokens_go_when_their_time_is_up_the_oldest_first(parts):
    gatherer, clock = parts
    slow, fast = Answer(), Answer()
    gatherer.add([slow.token(), fast.token()])
    gatherer.add([slow.token()])
    clock[0] = HOLD_S / 2
    gatherer.add([fast.token(), slow.token()])
    assert gatherer.wait_s() == pytest.approx(HOLD_S / 2)
    clock[0] = HOLD_S
    assert ids(gatherer.add([])) == [[2, 3]]
    clock[0] = 2 * HOLD_S
    assert ids(gatherer.add([])) == [[2]]


def test_the_end_goes_at_once_with_all_that_was_held(parts):
    gatherer, _ = parts
    ended, cancelled = Answer(), Answer()
    gatherer.add([ended.token(), cancelled.token()])
    gatherer.add([ended.token(), cancelled.token()])
    due = gatherer.add([ended.token("length"), cancelled.end("cancelled")])
    assert ids(due) == [[2, 3], [2]]
    assert [progress.reason for progress in due] == ["length", "cancelled"]
    assert gatherer.wait_s() is None


def test_an_answer_that_is_not_streamed_waits_for_its_end(parts):
    gatherer, clock = parts
    answer = Answer(stream=False)
    for _ in range(3 * MOST_TOKENS):
        assert gatherer.add([answer.token()]) == []
        clock[0] += HOLD_S
    assert gatherer.wait_s() is None
    assert ids(gatherer.add([answer.token("stop")])) == [list(range(1, 3 * MOST_TOKENS + 2))]


def test_a_stop_string_is_searched_for_meanwhile(parts):
    gatherer, clock = parts
    answer = Answer(stream=False, stop="x")
    gatherer.add([answer.token()])
    gatherer.add([answer.token()])
    clock[0] = HOLD_S
    assert ids(gatherer.add([])) == [[2]]
