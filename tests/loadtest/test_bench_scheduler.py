"""The simulation: a loop that is closed, the same each time, and as fast as its steps."""

from __future__ import annotations

import numpy as np
import pytest
from bench import scheduler as bench_scheduler
from bench.scheduler import Kind, Simulation

from tessera.engine.scheduling import policies


def simulated(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, answer: int, questions: int = 1, **options
) -> Simulation:
    simulation = Simulation(concurrency, Kind(1, 64, answer), seed=3, questions=questions, **options)
    monkeypatch.setattr(policies, "time", simulation)
    monkeypatch.setattr(bench_scheduler, "SKIPPED_MS", 500.0)
    simulation.run(3000.0)
    return simulation


def test_all_requests_stay_in_flight_and_two_runs_are_equal(monkeypatch):
    first, second = (simulated(monkeypatch, 8, 20) for _ in range(2))
    assert len(first._asked) + len(first._vision) + len(first._events) >= 8
    assert (first.tokens, first.first_tokens) == (second.tokens, second.first_tokens) and first.tokens > 500


def test_one_long_answer_gets_a_token_a_step(monkeypatch):
    simulation = simulated(monkeypatch, 1, 4000)
    step = float(np.interp(1, bench_scheduler.TOKENS, bench_scheduler.STEP_MS))
    assert simulation.tokens == pytest.approx(2500 / step, rel=0.1)


@pytest.mark.parametrize(("questions", "read"), [(1, [0]), (3, [64, 32, 32])])
def test_what_questions_about_a_picture_have_in_common_is_read_once(monkeypatch, questions, read):
    """``read``: tokens of each that others may find in the cache."""
    planned, submit = {}, Simulation._submit

    def submitted(simulation, question):
        submit(simulation, question)
        planned.setdefault(question.number, simulation._scheduler.waiting[-1])

    monkeypatch.setattr(Simulation, "_submit", submitted)
    simulated(monkeypatch, 1, 2, questions)
    prompts = [planned[number] for number in range(questions)]
    assert [len(each.offered) * 16 for each in prompts] == read


def test_kinds_of_requests_are_told_apart(monkeypatch):
    """A second tenant beside the first; and the load's open loop, of which nobody asks again."""
    tenants = simulated(monkeypatch, 8, 2, long_callers=1)
    assert len(tenants.spent["short"]) > 100 and {each.kind.name for each in tenants._asked.values()} >= {"long"}
    mixed = simulated(monkeypatch, 0, 1, mix=60.0, seconds=3.0)
    assert 120 < sum(map(len, mixed.spent.values())) < 180 and mixed.spent.keys() > {"short"}
