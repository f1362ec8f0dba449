"""The simulation: a loop that is closed, the same each time, and as fast as its steps."""

from __future__ import annotations

import bench_scheduler
import numpy as np
import pytest
from bench_scheduler import Simulation

from tessera.engine.scheduling import scheduler as scheduling


def simulated(monkeypatch: pytest.MonkeyPatch, concurrency: int, answer: int) -> Simulation:
    simulation = Simulation(concurrency, tiles=1, prompt=64, answer=answer, seed=3)
    monkeypatch.setattr(scheduling, "time", simulation)
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
