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


def test_questions_are_answered_beside_the_job_sooner_where_forwards_are_short():
    whole, short = (sorted(simulated(4.0, tiles, 20.0).first_tokens) for tiles in (16, 4))
    assert len(short) > 40 and short[len(short) // 2] < whole[len(whole) // 2] < 400
