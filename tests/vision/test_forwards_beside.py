"""A question's forward begins while one of a job is under way, where the runner can, and nothing else changes."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.backend import wait_until
from test_dispatch import BYTES, Job
from test_encoder import TOKENS, CountingRunner, TileFamily

from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import DeviceStreams, EmbeddingCache, LaunchedWork, RowBudget
from tessera.vision.scheduler import VisionScheduler

JOB = list(range(1, 9))  # the tiles of a full forward


class NotingRunner(CountingRunner):
    """Notes the tiles of each forward; those that cost up to two may run beside larger ones. Fails at tile 50."""

    beside = 2

    def __init__(self):
        super().__init__()
        self.forwards = []

    def run(self, tiles, wires=()):
        self.forwards.append(tiles[:, 0, 0, 0].tolist())
        if 50 in self.forwards[-1]:
            raise RuntimeError("the card melted")
        return super().run(tiles)


class Held(LaunchedWork):
    """Under way until a test ends it."""

    def __init__(self):
        super().__init__()
        self.end = threading.Event()

    @property
    def done(self):
        return self.end.is_set()

    def wait(self, *rows):
        assert self.end.wait(5)


class HeldStreams(DeviceStreams):
    """A device's: forwards take until a test ends them. ``works``: (whether it was beside another, its work);
    ``looks`` and ``waits`` count."""

    def __init__(self, runner):
        super().__init__()
        self._stream, self._second = "first", "second"
        self._runner, self._now, self.works, self.in_order_from = runner, "", [], []
        self.looks = self.waits = 0

    @property
    def free(self):
        self.looks += 1
        return super().free

    def wait_idle(self):
        self.waits += 1
        super().wait_idle()

    def beside(self, work):
        self.waits += 1
        return super().beside(work)

    def _launched(self, work, stream):
        before, self._now = len(self._runner.forwards), stream
        result = work()
        if len(self._runner.forwards) == before:
            return result, LaunchedWork()
        self.works.append((stream == "second", Held()))
        return result, self.works[-1][1]

    def in_order(self, work, *rows):
        assert rows
        self.in_order_from.append(self._now)
        work()


@contextmanager
def held(cache=0, runner=None, expects=True, **more):
    """A dispatcher while a forward of eight tiles of a job is under way, and another waits; it ``expects`` a question
    where one came before."""
    runner = runner or NotingRunner()
    lane = HeldStreams(runner)
    kept = EmbeddingCache(cache * BYTES, 2, torch.float32)
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily(), 8, lane=lane, cache=kept, **more))
    test = SimpleNamespace(dispatcher=dispatcher, lane=lane, forwards=runner.forwards, answers=[])

    def ask(number, *pictures, priority=0):
        dispatcher.encode([Job(number, pictures, test.answers, priority)])

    if expects:
        dispatcher.queue._expected.saw(0, time.monotonic_ns())

    def begun(*forwards):
        """Waits until exactly these have begun."""
        wait_until(lambda: len(lane.works) >= len(forwards), 5)
        assert [(beside, tiles) for (beside, _), tiles in zip(lane.works, runner.forwards, strict=True)] == [*forwards]

    def end(number):
        lane.works[number][1].end.set()

    test.ask, test.begun, test.end = ask, begun, end
    ask("job", JOB, [9, 10, 11], priority=10)
    begun((False, JOB))
    yield test
    # Whatever is left may run.
    lane._launched = lambda work, stream: (work(), LaunchedWork())
    for _, work in lane.works:
        work.end.set()
    dispatcher.close()


def numbers(test):
    return [number for number, _ in test.answers]


def waits(test, act):
    """Whether the encoder's thread waits for a forward after ``act``, having begun none."""
    before, begun = test.lane.waits, len(test.lane.works)
    act()
    wait_until(lambda: test.lane.waits > before, 5)
    return len(test.lane.works) == begun


def looks_on(test):
    """Until the encoder's thread, which waits for a free lane or somebody better, has looked again at all it could."""
    looks = test.lane.looks
    wait_until(lambda: test.lane.looks > looks + 2, 5)


def test_a_question_is_answered_while_the_forward_of_a_job_is_under_way():
    with held() as test:
        test.ask("question", [40])
        test.begun((False, JOB), (True, [40]))
        test.end(1)
        wait_until(lambda: test.answers == [("question", [40])], 5)
        test.end(0)
        test.begun((False, JOB), (True, [40]), (False, [9, 10, 11]))
        test.end(2)
        wait_until(lambda: numbers(test) == ["question", "job"], 5)


def test_the_next_forward_waits_for_both():
    with held() as test:
        test.ask("question", [40])
        test.begun((False, JOB), (True, [40]))
        test.end(0)
        looks_on(test)
        assert len(test.lane.works) == 2
        test.end(1)
        test.begun((False, JOB), (True, [40]), (False, [9, 10, 11]))


def test_who_could_not_go_beside_waits_for_both():
    with held() as test:
        test.ask("question", [40])
        test.begun((False, JOB), (True, [40]))
        assert waits(test, lambda: test.ask("large", [41, 42, 43]))
        test.end(0)
        assert not test.lane.free and len(test.lane.works) == 2
        test.end(1)
        test.begun((False, JOB), (True, [40]), (False, [41, 42, 43]))


def test_a_forward_waits_for_one_beside_the_last():
    lane, begun = HeldStreams(runner := NotingRunner()), []
    run = partial(runner.run, np.zeros((1, 2, 2, 3), np.uint8))
    lane.forward(run)
    lane.beside(run)
    thread = threading.Thread(target=lambda: begun.append(lane.forward(run)))
    thread.start()
    lane.works[0][1].end.set()
    thread.join(0.05)
    assert not begun and thread.is_alive()
    lane.works[1][1].end.set()
    thread.join(5)
    assert len(begun) == 1


def test_a_second_question_waits_for_the_first():
    with held() as test:
        test.ask("first", [40])
        test.begun((False, JOB), (True, [40]))
        assert waits(test, lambda: test.ask("second", [41], [42]))
        test.end(1)
        test.begun((False, JOB), (True, [40]), (True, [41, 42]))
        test.end(2)
        wait_until(lambda: numbers(test) == ["first", "second"], 5)


def test_questions_that_come_together_go_as_many_as_fit():
    with held() as test:
        jobs = [Job(number, [[number]], test.answers) for number in (40, 41, 42)]
        test.dispatcher.encode(jobs)
        test.begun((False, JOB), (True, [40, 41]))
        test.end(1)
        test.begun((False, JOB), (True, [40, 41]), (True, [42]))


@pytest.mark.parametrize("picture", [[40, 41, 42], JOB])
def test_what_is_too_large_waits_for_the_forward(picture):
    """The job's own picture besides is known as soon as its forward is launched."""
    with held(cache=8) as test:
        assert waits(test, lambda: test.ask("question", picture))
        test.end(0)
        wait_until(lambda: len(test.lane.works) == 2, 5)
        beside, _ = test.lane.works[1]
        assert not beside
        # A known one needs no forward: the second is the job's.
        assert test.forwards[1] == ([9, 10, 11] if picture == JOB else picture)


def test_a_small_known_picture_waits_and_is_not_computed_again():
    with held(cache=8) as test:
        test.ask("question", [40])
        test.begun((False, JOB), (True, [40]))
        assert test.lane.in_order_from == ["first", "second"]
        test.end(1)
        assert waits(test, lambda: test.ask("again", [40]))
        test.end(0)
        test.begun((False, JOB), (True, [40]), (False, [9, 10, 11]))
        wait_until(lambda: numbers(test) == ["question", "again"], 5)


def test_a_ping_waits_for_the_forward():
    """Its answer says that the device works."""
    with held() as test:
        assert waits(test, lambda: test.dispatcher.ping(Job("ping", [], test.answers)))
        assert not test.answers
        test.end(0)
        wait_until(lambda: "ping" in numbers(test), 5)


def test_nobody_of_the_jobs_own_priority_goes_beside_it():
    with held() as test:
        test.ask("same", [40], priority=10)
        looks_on(test)
        assert len(test.lane.works) == 1
        test.end(0)
        test.begun((False, JOB), (False, [9, 10, 11]))
        test.end(1)
        test.begun((False, JOB), (False, [9, 10, 11]), (False, [40]))


def test_a_question_that_is_taken_when_a_batch_is_launched_goes_beside_its_last_forward():
    with held() as test:
        test.end(0)
        test.begun((False, JOB), (False, [9, 10, 11]))  # none of its batch is left: nobody is passed
        test.ask("question", [40])
        test.begun((False, JOB), (False, [9, 10, 11]), (True, [40]))
        test.ask("next", [41])
        test.end(2)
        test.begun((False, JOB), (False, [9, 10, 11]), (True, [40]), (True, [41]))
        test.end(3)
        wait_until(lambda: numbers(test)[-2:] == ["question", "next"], 5)
        assert "job" not in numbers(test)


@contextmanager
def held_last():
    """The same while the last forward of a job is under way and nobody waits."""
    with held() as test:
        test.end(0)
        test.begun((False, JOB), (False, [9, 10, 11]))
        yield test


def test_beside_the_last_forward_go_as_many_as_fit_too():
    with held_last() as test:
        test.dispatcher.encode([Job(number, [[number]], test.answers) for number in (40, 41, 42)])
        test.begun((False, JOB), (False, [9, 10, 11]), (True, [40, 41]))
        test.end(2)
        test.begun((False, JOB), (False, [9, 10, 11]), (True, [40, 41]), (True, [42]))


def test_after_a_ping_which_needs_no_forward_a_question_still_goes_beside_one():
    with held_last() as test:
        test.dispatcher.ping(Job("ping", [], test.answers))
        wait_until(lambda: not len(test.dispatcher.queue), 5)
        test.ask("question", [40])
        test.begun((False, JOB), (False, [9, 10, 11]), (True, [40]))
        assert not test.answers  # the ping's comes behind the job's


def test_nobody_goes_beside_a_forward_of_its_own_priority_that_passes_a_job():
    with held() as test:
        assert waits(test, lambda: test.ask("large", [40, 41, 42]))
        test.end(0)
        test.begun((False, JOB), (False, [40, 41, 42]))
        assert waits(test, lambda: test.ask("small", [43]))
        test.end(1)
        test.begun((False, JOB), (False, [40, 41, 42]), (False, [43]))


def test_nothing_runs_beside_a_forward_as_small_as_itself():
    with held() as test:
        test.end(0)
        test.begun((False, JOB), (False, [9, 10, 11]))
        test.end(1)
        wait_until(lambda: numbers(test) == ["job"], 5)
        test.ask("small", [20], [21], priority=10)
        test.begun((False, JOB), (False, [9, 10, 11]), (False, [20, 21]))
        assert waits(test, lambda: test.ask("question", [40]))
        test.end(2)
        test.begun((False, JOB), (False, [9, 10, 11]), (False, [20, 21]), (False, [40]))


@pytest.mark.parametrize(("beside", "expects"), [(0, True), (2, False)])
def test_where_the_runner_cannot_or_no_question_came_of_late_everyone_waits(beside, expects):
    """Without looking again and again."""
    runner = NotingRunner()
    runner.beside = beside
    with held(runner=runner, expects=expects) as test:
        wait_until(lambda: test.lane.waits == 3, 5)  # twice before the first forward, now before the second
        test.ask("question", [40])
        assert test.lane.looks == 1
        test.end(0)
        test.begun((False, JOB), (False, [40]))


def test_who_finds_no_room_for_its_rows_waits():
    with held(budget=RowBudget(BYTES, 11 * BYTES)) as test:
        assert waits(test, lambda: test.ask("question", [40]))
        test.end(0)
        test.begun((False, JOB), (False, [9, 10, 11]))


def test_an_error_beside_fails_its_own_request_only():
    budget = RowBudget(BYTES, 100 * BYTES)
    with held(budget=budget) as test:
        test.ask("bad", [50])
        wait_until(lambda: numbers(test) == ["bad"], 5)
        assert str(test.answers[0][1]) == "the card melted"
        test.ask("good", [40])
        wait_until(lambda: len(test.lane.works) == 2 and test.lane.works[1][0], 5)
        test.end(1)
        wait_until(lambda: test.answers[1:] == [("good", [40])], 5)
    assert test.answers[2:] == [("job", [*JOB, 9, 10, 11])] and budget.used_bytes == 0


def test_on_the_cpu_no_forward_is_ever_under_way():
    lane = DeviceStreams()
    rows, work = lane.beside(lambda: torch.ones(TOKENS))
    kept = []
    lane.in_order(lambda: kept.append(rows), rows)
    assert work.done and lane.free and len(kept) == 1
