"""What a step costs, by what steps took."""

from __future__ import annotations

import pytest
from engine_fakes import make_request, run, tiny_engine, tiny_model, tokens_of

from tessera.engine.scheduling.policies import CostModel


def test_between_what_was_measured_times_grow_in_straight_lines_and_beyond_in_proportion():
    costs = CostModel([(1, 400), (64, 500), (256, 900)])
    assert [costs.step_ns(tokens) for tokens in (0.5, 1, 64, 160, 256, 512)] == [200, 400, 500, 700, 900, 1800]


def test_the_fastest_of_the_recent_steps_of_about_as_many_tokens_counts():
    costs = CostModel([(100, 1000)])
    for ns, expected in [(3000, 1000)] * 7 + [(2000, 2000), (5000, 2000), (1500, 1500)]:
        costs.record(100, ns)
        assert costs.step_ns(100) == expected
    costs.record(120, 1200)  # 10 a token
    assert costs.step_ns(100) == pytest.approx(1000)


def test_a_step_that_was_held_up_makes_none_of_more_tokens_slower():
    costs = CostModel([(1, 400), (64, 10**9), (256, 900)])
    assert (costs.step_ns(64), costs.step_ns(256)) == (900, 900)


@pytest.mark.parametrize(("cache_bytes", "measured"), [(0, [1, 64, 256, 512]), (40_000, [1, 64])])
def test_a_runner_measures_steps_as_far_as_its_cache_holds_them(cache_bytes, measured):
    engine = tiny_engine(tiny_model(), max_model_len=70, kv_cache_bytes=cache_bytes or None)
    engine._runner.time_steps(70, engine._config)
    assert [tokens for tokens, _ in engine._runner.step_times] == measured
    assert all(ns > 0 for _, ns in engine._runner.step_times)
    engine.submit(make_request([1, 2, 3], max_tokens=5, ignore_eos=True))
    assert len(tokens_of(run(engine))) == 5
