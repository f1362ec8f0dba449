"""The counting rule on runs that are worked out by hand."""

import counting
import pytest
from closed_loop import Answered


def worked() -> list[Answered]:
    """Two in flight, 15 answers: 3 of warm-up, 10 steady, 2 of draining, the last of which took its time.

    Answer k ends k seconds after the start, took k tenths of a second and had k tokens in 2 k parts.
    """
    answers = [Answered(100.0 + k, k / 10, k / 100, k, 2 * k, (k, 20.0 - k)) for k in range(1, 15)]
    return [*answers, Answered(120.0, 1.5, 0.15, 15, 30, (15, 5.0))]


def test_a_run_worked_out_by_hand():
    assert [counting.requests(each) for each in (256, 10, 3)] == [1920, 75, 23]
    run = counting.count(100.0, worked(), concurrency=2)
    assert run.count == 10  # answers 4 to 13
    assert (run.began, run.ended) == (104.0, 113.0)
    assert run.requests_s == pytest.approx(9 / 9)
    assert run.tokens_s == pytest.approx((5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13) / 9)
    assert run.parts_s == pytest.approx(2 * 81 / 9)
    assert (run.p50, run.p99) == (0.9, 1.3)
    assert (run.first_token_p50, run.first_token_p99) == (0.09, 0.13)
    assert run.stages_p50 == (9, 12.0)  # each by itself
    assert run.windows == (1, 1, 1, 1, 1) and run.margin == 0
    assert run.whole_requests_s == pytest.approx(15 / 20)
    assert run.whole_tokens_s == pytest.approx(120 / 20)


def test_five_windows_say_how_sure_the_rate_is():
    # Two in flight: three ends of warm-up a second apart, then a round of two in each window, which took so long.
    ends, at = [98.0, 99.0, 100.0], 100.0
    for seconds in (0.5, 1.0, 0.5, 1.0, 2.0):
        ends += [at + seconds / 2, at + seconds]
        at += seconds
    run = counting.count(90.0, [Answered(end, 1.0, None, 4, 1) for end in [*ends, 106.0, 107.0]], concurrency=2)
    assert run.windows == (4, 2, 4, 2, 1)
    # Their variance is (1.4**2 + 0.6**2 + 1.4**2 + 0.6**2 + 1.6**2) / 4 = 1.8; t of four degrees of freedom is 2.776.
    assert counting.margin(run.windows) == pytest.approx(2.776 * (1.8 / 5) ** 0.5)
    assert run.margin == pytest.approx(2.776 * 0.6 / run.requests_s)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_run_too_short_or_with_part_of_a_round_is_refused(missing):
    with pytest.raises(ValueError, match="at least 5"):
        counting.count(100.0, worked()[missing:], concurrency=2)
    longer = [*worked(), Answered(121.0, 1.0, None, 1, 1)]
    with pytest.raises(ValueError, match="whole rounds of 2"):
        counting.count(100.0, longer, concurrency=2)
