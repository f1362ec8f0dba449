"""The engine's loop: nothing hangs, whatever a step does."""

from __future__ import annotations

import threading

import pytest
from engine_fakes import make_engine, make_request
from fakes.backend import wait_until

from tessera.engine.engine import Engine
from tessera.engine.process.main import StepLoop
from tessera.errors import Unavailable

PATIENCE = 10


class Running:
    """An engine whose loop runs on a thread; collects the ends that it tells of, one of each request."""

    def __init__(self, engine):
        self.engine, self.ended = engine, {}
        self.loop = StepLoop(engine, self._hear)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    def start(self):
        self.thread.start()
        return self

    def stop(self):
        self.loop.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()

    def submit(self, request):
        sequence = self.engine.submit(request)
        self.loop.wake()
        return sequence

    def _hear(self, progress):
        assert not self.ended.keys() & {end.number for end in progress.ends}
        self.ended |= {end.number: end for end in progress.ends}

    def wait(self, *sequences):
        numbers = [sequence.request.number for sequence in sequences]
        wait_until(lambda: all(number in self.ended for number in numbers))
        return [self.ended[number].reason for number in numbers]


@pytest.fixture
def parts():
    engine, runner = plain_engine()
    running = Running(engine).start()
    yield running, runner
    running.stop()


def plain_engine():
    """The fakes' engine, telling progress instead of text."""
    engine, runner = make_engine()
    engine.__class__ = Engine
    return engine, runner


def test_a_failing_step_ends_its_requests_and_the_next_ones_work(parts, caplog):
    running, runner = parts
    works = runner.run

    def fail(batch):
        raise ValueError("a broken kernel")

    runner.run = fail
    first = running.submit(make_request([1], max_tokens=3))
    assert running.wait(first) == ["error"]
    assert "a step failed" in running.ended[first.request.number].error
    assert "a broken kernel" in caplog.text and "kernel" not in running.ended[first.request.number].error
    runner.run = works
    second = running.submit(make_request([1], max_tokens=3, ignore_eos=True))
    assert running.wait(second) == ["length"]


def test_leaked_blocks_are_found_when_idle(monkeypatch):
    monkeypatch.setattr("tessera.engine.process.main._IDLE_SECONDS", 0.01)
    engine, _ = plain_engine()
    engine.scheduler.blocks._holders[3] = 1
    running = Running(engine).start()
    wait_until(lambda: not engine.scheduler.blocks._holders[3])
    assert running.wait(running.submit(make_request([1], max_tokens=3, ignore_eos=True))) == ["length"]
    running.stop()


def test_stopping_ends_what_runs_and_refuses_more():
    engine, runner = plain_engine()
    running, stepping, go_on = Running(engine), threading.Event(), threading.Event()
    works = runner.run

    def slow(batch):
        stepping.set()
        assert go_on.wait(PATIENCE)
        return works(batch)

    runner.run = slow
    running.start()
    sequence = running.submit(make_request([1], max_tokens=50, ignore_eos=True))
    assert stepping.wait(PATIENCE)
    stopper = threading.Thread(target=running.stop)
    stopper.start()
    go_on.set()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    assert running.wait(sequence) == ["error"]
    with pytest.raises(Unavailable):
        running.submit(make_request([1]))
