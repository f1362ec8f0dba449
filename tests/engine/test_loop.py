"""The engine's thread: nothing hangs, whatever a step does."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from engine_fakes import make_engine, make_request

from tessera.engine.loop import EngineLoop
from tessera.errors import Unavailable

PATIENCE = 10


class Inbox:
    """Collects events and lets a test wait for the ends of requests."""

    def __init__(self):
        self.events, self.ended = [], {}
        self._changed = threading.Condition()

    def __call__(self, events):
        with self._changed:
            self.events += events
            self.ended |= {e.request: e for e in events if e.finish_reason}
            self._changed.notify_all()

    def wait(self, *sequences):
        with self._changed:
            assert self._changed.wait_for(lambda: all(s.request in self.ended for s in sequences), PATIENCE)
        return [self.ended[s.request].finish_reason for s in sequences]


@pytest.fixture
def parts():
    engine, runner = make_engine()
    inbox = Inbox()
    loop = EngineLoop(engine, inbox)
    loop.start()
    yield loop, runner, inbox
    loop.stop()


def test_requests_from_many_threads_each_end_once(parts):
    loop, _, inbox = parts
    sequences, lock = [], threading.Lock()

    def client(number):
        for turn in range(5):
            sequence = loop.submit(make_request([number, turn], max_tokens=4, ignore_eos=True))
            with lock:
                sequences.append(sequence)
            if turn % 2:
                loop.abort(sequence)

    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert set(inbox.wait(*sequences)) <= {"length", "cancelled"}
    assert Counter(e.request for e in inbox.events if e.finish_reason) == Counter(s.request for s in sequences)


def test_a_failing_step_ends_its_requests_and_the_next_ones_work(parts, caplog):
    loop, runner, inbox = parts
    works = runner.run

    def fail(batch):
        raise ValueError("a broken kernel")

    runner.run = fail
    first = loop.submit(make_request([1], max_tokens=3))
    assert inbox.wait(first) == ["error"]
    assert "a step failed" in inbox.ended[first.request].error
    assert "a broken kernel" in caplog.text and "kernel" not in inbox.ended[first.request].error
    runner.run = works
    second = loop.submit(make_request([1], max_tokens=3, ignore_eos=True))
    assert inbox.wait(second) == ["length"]


def test_an_idle_loop_sleeps(parts):
    loop, _, inbox = parts
    inbox.wait(loop.submit(make_request([1], max_tokens=1)))
    looks, has_work = [], loop.engine.has_work
    loop.engine.has_work = lambda: looks.append(1) or has_work()
    time.sleep(0.1)
    assert len(looks) <= 1


def test_leaked_blocks_are_found_when_idle(monkeypatch):
    monkeypatch.setattr("tessera.engine.loop._IDLE_SECONDS", 0.01)
    engine, _ = make_engine()
    engine.scheduler.blocks._holders[3] = 1
    inbox = Inbox()
    loop = EngineLoop(engine, inbox)
    loop.start()
    deadline = time.monotonic() + PATIENCE
    while engine.scheduler.blocks._holders[3] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.scheduler.blocks._holders[3] == 0
    assert inbox.wait(loop.submit(make_request([1], max_tokens=3, ignore_eos=True))) == ["length"]
    loop.stop()


def test_a_failing_listener_does_not_stop_the_loop():
    engine, _ = make_engine()
    inbox, calls = Inbox(), []

    def listen(events):
        calls.append(events)
        if len(calls) == 1:
            raise OSError("the client left")
        inbox(events)

    loop = EngineLoop(engine, listen)
    loop.start()
    assert inbox.wait(loop.submit(make_request([1], max_tokens=3, ignore_eos=True))) == ["length"]
    loop.stop()


def test_stopping_ends_what_runs_and_refuses_more():
    engine, runner = make_engine()
    inbox, running, go_on = Inbox(), threading.Event(), threading.Event()
    works = runner.run

    def slow(batch):
        running.set()
        assert go_on.wait(PATIENCE)
        return works(batch)

    runner.run = slow
    loop = EngineLoop(engine, inbox)
    loop.start()
    sequence = loop.submit(make_request([1], max_tokens=50, ignore_eos=True))
    assert running.wait(PATIENCE)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    go_on.set()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    assert inbox.wait(sequence) == ["error"]
    with pytest.raises(Unavailable):
        loop.submit(make_request([1]))
