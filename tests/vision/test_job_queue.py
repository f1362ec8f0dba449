"""Who is taken out of the queue, and when."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tessera.prompt.sampling import STEP_NS
from tessera.vision import scheduler
from tessera.vision.scheduler import MOST, JobQueue


@pytest.fixture
def clock(monkeypatch):
    """Steps of aging that a test sets."""
    now = SimpleNamespace(steps=0.0)
    monkeypatch.setattr(scheduler.time, "monotonic_ns", lambda: int(now.steps * STEP_NS))
    return now


@pytest.fixture
def queue():
    return JobQueue()


def job(priority, **about):
    return SimpleNamespace(**{"priority": priority, "since_ns": 0, **about})


def put(queue, *priorities):
    queue.put(map(job, priorities))


def priorities(entries):
    return [entry.job.priority for entry in entries]


def test_the_better_first_equal_ones_in_order_and_one_priority_at_a_time(clock, queue):
    dice = random.Random(0)
    jobs = [job(dice.choice((-2, 0, 0, 0, 3)), number=number) for number in range(3 * MOST)]
    queue.put(jobs)
    queue.close()
    batches = list(iter(queue.take, []))
    assert [entry.job for batch in batches for entry in batch] == sorted(jobs, key=lambda job: job.priority)
    assert all(len(batch) <= MOST and len(set(priorities(batch))) == 1 for batch in batches)


def test_nobody_is_passed_for_ever(clock, queue):
    put(queue, 2)
    found = []
    for clock.steps in (1.0, 1.9, 2.1, 2.2):
        put(queue, 0)
        found += priorities(queue.take())
    assert found == [0, 0, 2, 0, 0]


def test_only_what_is_better_and_first_passes(clock, queue):
    put(queue, 5)
    (entry,) = queue.take()
    put(queue, 5, 6)
    assert queue.take_before(entry) == []
    put(queue, 4, 4)
    found = queue.take_before(entry)
    assert priorities(found) == [4, 4]
    queue.put_back(found)
    assert queue.take_before(entry) == found
    clock.steps = 1.1
    put(queue, 4)
    assert queue.take_before(entry) == []


def test_nobody_passes_along_with_a_ping(queue):
    put(queue, -7)
    (entry,) = queue.take()
    put(queue, 0)
    queue.put_first(SimpleNamespace(priority=0))
    assert len(queue.take_before(entry)) == 1 and len(queue.take()) == 1


def test_who_waits_for_a_better_one_is_woken_or_looks_again(monkeypatch, queue):
    asked, over = threading.Event(), threading.Event()
    put(queue, 5)
    (entry,) = queue.take()

    def until():
        asked.set()
        return over.is_set()

    def taken_while(act):
        asked.clear()
        with ThreadPoolExecutor(1) as one:
            found = one.submit(queue.take_before, entry, until)
            assert asked.wait(5) and not found.done()
            act()
            return priorities(found.result(5))

    monkeypatch.setattr(scheduler, "_SLICE_S", 3600.0)
    assert taken_while(lambda: put(queue, 5, 4)) == [4]
    assert taken_while(lambda: (over.set(), queue.wake())) == []
    over.clear()
    monkeypatch.setattr(scheduler, "_SLICE_S", 0.001)
    assert taken_while(over.set) == []


def test_a_better_one_is_expected_for_30_seconds_after_the_last(clock, queue):
    put(queue, 10)
    assert not queue.expects_before(10) and queue.expects_before(11)
    put(queue, 0)
    for clock.steps, expected in ((0, True), (0.49, True), (0.51, False)):  # of a minute
        put(queue, 10)
        assert queue.expects_before(10) == expected and not queue.expects_before(0)


def test_who_waited_before_goes_by_the_age_of_both_waits(clock, queue):
    clock.steps = 5.0
    put(queue, 0)
    (entry,) = queue.take()
    queue.put([job(0, since_ns=4 * STEP_NS), job(0, since_ns=5 * STEP_NS + 1), job(1, since_ns=4 * STEP_NS - 1)])
    assert [each.job.since_ns / STEP_NS for each in queue.take_before(entry)] == [4.0]
