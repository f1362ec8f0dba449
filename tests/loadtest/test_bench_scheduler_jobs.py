"""The simulation of questions beside a job: a closed loop, the same each time, whose forwards are waited for."""

from __future__ import annotations

import bench_scheduler_jobs
import pytest
from bench_scheduler_jobs import CONCURRENCY, simulated

from tessera.engine.scheduling import scheduler as scheduling


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "time", scheduling.time)  # is put back
    monkeypatch.setattr(bench_scheduler_jobs, "SKIPPED_MS", 3000.0)


def test_all_requests_stay_in_flight_and_two_runs_are_equal():
    first, second = (simulated(0.0, 16, 6.0) for _ in range(2))
    vision = len(first._vision) + len(first._taken) + (len(first._forward.of) if first._forward else 0)
    assert vision + len(first._asked) + len(first._events) >= CONCURRENCY
    assert first.answers == second.answers == pytest.approx(3 * 126, rel=0.1) and not first.first_tokens


def test_questions_are_answered_sooner_where_they_wait_for_short_forwards_or_none():
    ways = ((16, False), (4, False), (16, True))
    waited = [sorted(simulated(4.0, tiles, 20.0, beside).first_tokens) for tiles, beside in ways]
    whole, short, beside = (times[len(times) // 2] for times in waited)
    assert min(map(len, waited)) > 40 and max(short, beside) < whole < 400
