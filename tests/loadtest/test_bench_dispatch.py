"""The dispatch benchmark's own arithmetic, and its pairs."""

from __future__ import annotations

import bench_dispatch
import bench_serve
from bench_serve import Answered


def test_prompts_a_step_counts_only_the_steps_in_which_one_began():
    before = {"tessera_prompts_total": 10.0, "tessera_prefill_steps_total": 10.0}
    after = {"tessera_prompts_total": 34.0, "tessera_prefill_steps_total": 16.0}
    assert bench_dispatch.prefill_batch(before, after) == 4.0
    assert bench_dispatch.prefill_batch(after, after) == 0.0
    assert set(before) <= set(bench_serve.COUNTED)


def test_the_pairs_are_those_of_the_seed():
    assert bench_dispatch.PAIRS == ((1, 1), (1, 8), (8, 8), (32, 1))
    assert bench_dispatch.pair("32,1") == (32, 1)


def test_latencies_are_whole_requests():
    answers = [Answered(10.0, 10.5, 10.0 + spent, 1) for spent in (0.1, 0.3, 0.2)]
    assert bench_serve.latencies(answers) == {"p50_ms": 200.0, "p99_ms": 300.0}
