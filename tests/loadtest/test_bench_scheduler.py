"""The simulation: loops that are closed, the same each time, and as fast as their steps."""

import numpy as np
import pytest
from bench import scheduler as bench_scheduler
from bench.scheduler import Options, Simulation

from tessera.engine.scheduling import policies


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "time", policies.time)  # is put back
    monkeypatch.setattr(bench_scheduler, "SKIPPED_MS", 500.0)


def simulated(concurrency: int, answer: int, **options) -> Simulation:
    return Simulation(Options(concurrency, prompt=64, answer=answer, seconds=3.0, **options), seed=3).run()


def test_loops_are_closed_the_same_each_time_and_as_fast_as_their_steps():
    first, second = (simulated(8, 20) for _ in range(2))
    assert len(first._asked) + len(first._vision) + len(first._events) >= 8
    assert (first.tokens, first.first_tokens) == (second.tokens, second.first_tokens) and first.tokens > 500
    step = float(np.interp(1, bench_scheduler.TOKENS, bench_scheduler.STEP_MS))
    assert simulated(1, 4000).tokens == pytest.approx(2500 / step, rel=0.1)  # one long answer gets a token a step


@pytest.mark.parametrize(("questions", "read"), [(1, [0]), (3, [64, 32, 32])])
def test_what_questions_about_a_picture_have_in_common_is_read_once(monkeypatch, questions, read):
    """``read``: tokens of each that others may find in the cache."""
    planned, submit = {}, Simulation._submit

    def submitted(simulation, question):
        submit(simulation, question)
        planned.setdefault(question.number, simulation._scheduler.waiting[-1])

    monkeypatch.setattr(Simulation, "_submit", submitted)
    simulated(1, 2, questions=questions)
    prompts = [planned[number] for number in range(questions)]
    assert [len(each.offered) * 16 for each in prompts] == read


def test_kinds_of_requests_are_told_apart():
    """A second tenant beside the first; and the load's open loop, of which nobody asks again."""
    tenants = simulated(8, 2, long_callers=1)
    assert len(tenants.spent["short"]) > 100 and {each.kind.name for each in tenants._asked.values()} >= {"long"}
    mixed = simulated(8, 1, mix=60.0)
    assert 120 < sum(map(len, mixed.spent.values())) < 180 and mixed.spent.keys() > {"short"}
