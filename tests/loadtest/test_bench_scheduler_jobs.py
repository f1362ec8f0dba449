"""The simulation of questions beside a job: a closed loop, the same each time, whose forwards are waited for."""

from __future__ import annotations

import statistics

import counting
import pytest
from bench import scheduler_jobs as bench_scheduler_jobs
from bench.scheduler_jobs import CONCURRENCY, simulated

from tessera.engine.scheduling import policies
from tessera.engine.scheduling.policies import Rules


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "time", policies.time)  # is put back
    monkeypatch.setattr(bench_scheduler_jobs, "SKIPPED_MS", 3000.0)


def test_all_requests_stay_in_flight_and_two_runs_are_equal():
    first, second = (simulated(0.0, 6.0) for _ in range(2))
    vision = len(first._vision) + len(first._taken) + (len(first._forward.of) if first._forward else 0)
    assert vision + len(first._asked) + len(first._events) >= CONCURRENCY
    assert first.answered == second.answered and not first.first_tokens
    assert len(first.answered) == pytest.approx(3 * 126, rel=0.1)


def test_questions_wait_for_a_step_and_the_job_for_all_of_its_own():
    simulation = simulated(4.0, 20.0)
    first_token, answer = (statistics.median(times) for times in (simulation.first_tokens, simulation.answered))
    assert len(simulation.first_tokens) > 40 and 50 < first_token < 250 and 1900 < answer < 2300


def test_the_job_alone_waits_evenly_for_as_long_as_no_step_has_all_tokens(monkeypatch):
    def spread(rules):
        times = sorted(simulated(0.0, 30.0, rules).answered)
        return counting.percentile(times, 0.99) / statistics.median(times)

    monkeypatch.setattr(bench_scheduler_jobs, "SKIPPED_MS", 10_000.0)  # until they are spread
    assert spread(Rules()) < 1.03 < 1.06 < spread(Rules(even_steps=False))
