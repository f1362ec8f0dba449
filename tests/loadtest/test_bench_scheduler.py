"""The simulations: loops that are closed, the same each time, and as fast as their steps."""

from __future__ import annotations

import statistics

import counting
import numpy as np
import pytest
from bench import scheduler as bench_scheduler
from bench import scheduler_jobs
from bench.scheduler import ClosedLoop, Kind
from bench.scheduler_jobs import CONCURRENCY

from tessera.engine.scheduling import policies
from tessera.engine.scheduling.policies import Rules


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "time", policies.time)  # is put back
    monkeypatch.setattr(bench_scheduler, "SKIPPED_MS", 500.0)
    monkeypatch.setattr(scheduler_jobs, "SKIPPED_MS", 3000.0)


def simulated(concurrency: int, answer: int, questions: int = 1, **options) -> ClosedLoop:
    loop = ClosedLoop(concurrency, Kind(1, 64, answer), seed=3, questions=questions, **options)
    return bench_scheduler.simulate(loop, 3.0)


def test_all_requests_stay_in_flight_and_two_runs_are_equal():
    first, second = (simulated(8, 20) for _ in range(2))
    assert len(first._asked) + len(first._vision) + len(first._events) >= 8
    assert (first.tokens, first.first_tokens) == (second.tokens, second.first_tokens) and first.tokens > 500


def test_one_long_answer_gets_a_token_a_step():
    simulation = simulated(1, 4000)
    step = float(np.interp(1, bench_scheduler.TOKENS, bench_scheduler.STEP_MS))
    assert simulation.tokens == pytest.approx(2500 / step, rel=0.1)


@pytest.mark.parametrize(("questions", "read"), [(1, [0]), (3, [64, 32, 32])])
def test_what_questions_about_a_picture_have_in_common_is_read_once(monkeypatch, questions, read):
    """``read``: tokens of each that others may find in the cache."""
    planned, submit = {}, ClosedLoop._submit

    def submitted(simulation, question):
        submit(simulation, question)
        planned.setdefault(question.number, simulation._scheduler.waiting[-1])

    monkeypatch.setattr(ClosedLoop, "_submit", submitted)
    simulated(1, 2, questions)
    prompts = [planned[number] for number in range(questions)]
    assert [len(each.offered) * 16 for each in prompts] == read


def test_kinds_of_requests_are_told_apart():
    """A second tenant beside the first; and the load's open loop, of which nobody asks again."""
    tenants = simulated(8, 2, long_callers=1)
    assert len(tenants.spent["short"]) > 100 and {each.kind.name for each in tenants._asked.values()} >= {"long"}
    mixed = simulated(0, 1, mix=60.0, seconds=3.0)
    assert 120 < sum(map(len, mixed.spent.values())) < 180 and mixed.spent.keys() > {"short"}


# ---- questions beside a job


def test_all_requests_of_the_job_stay_in_flight_and_two_runs_are_equal():
    first, second = (scheduler_jobs.simulated(0.0, 6.0) for _ in range(2))
    vision = len(first._vision) + len(first._taken) + (len(first._forward.of) if first._forward else 0)
    assert vision + len(first._asked) + len(first._events) >= CONCURRENCY
    assert first.answered == second.answered and not first.first_tokens
    assert len(first.answered) == pytest.approx(3 * 126, rel=0.1)


def test_questions_wait_for_a_step_and_the_job_for_all_of_its_own():
    simulation = scheduler_jobs.simulated(4.0, 20.0)
    first_token, answer = (statistics.median(times) for times in (simulation.first_tokens, simulation.answered))
    assert len(simulation.first_tokens) > 40 and 50 < first_token < 250 and 1900 < answer < 2300


def test_the_job_alone_waits_evenly_for_as_long_as_no_step_has_all_tokens(monkeypatch):
    def spread(rules):
        times = sorted(scheduler_jobs.simulated(0.0, 30.0, rules).answered)
        return counting.percentile(times, 0.99) / statistics.median(times)

    monkeypatch.setattr(scheduler_jobs, "SKIPPED_MS", 10_000.0)  # until they are spread
    assert spread(Rules()) < 1.03 < 1.06 < spread(Rules(even_steps=False))
