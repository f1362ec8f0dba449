"""A question's forward begins while one of a job is under way, where the runner can, and nothing else changes."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from fakes.backend import wait_until
from vision_fakes import BYTES, TOKENS, Job, TileRunner, encoder

from tessera.vision.memory import DeviceStreams, LaunchedWork, RowBudget
from tessera.vision.scheduler import VisionScheduler

JOB, REST = list(range(1, 9)), [9, 10, 11]  # a job's two pictures: the first fills a forward


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


class Stage:
    """A scheduler while a forward of eight tiles of a job is under way, and another waits; it ``expects`` a question
    where one came before. The runner may run up to two tiles beside larger ones."""

    def __init__(self, cache=0, beside=2, expects=True, **more):
        self.runner = TileRunner(beside=beside)
        self.lane, self.answers, self.begun = HeldStreams(self.runner), [], []
        self.scheduler = VisionScheduler(encoder(8, cache, self.runner, lane=self.lane, **more))
        if expects:
            self.scheduler.queue._expected.saw(0, time.monotonic_ns())
        self.ask([JOB, REST], priority=10)
        self.begins(False, JOB)

    def ask(self, *requests, priority=0):
        """Requests of pictures, each named by its first tile."""
        jobs = [Job(pictures[0][0], pictures, self.answers, priority) for pictures in requests]
        self.scheduler.encode(jobs)

    def begins(self, beside, tiles):
        """Waits for another forward, which is exactly this."""
        self.begun.append((beside, tiles))
        wait_until(lambda: len(self.lane.works) >= len(self.begun))
        assert [(b, t) for (b, _), t in zip(self.lane.works, self.runner.forwards, strict=True)] == self.begun

    def end(self, number):
        self.lane.works[number][1].end.set()

    def answered(self, *names):
        wait_until(lambda: len(self.answers) >= len(names))
        assert [name for name, _ in self.answers] == [*names]

    def waits(self, *requests, act=None):
        """Asks; the encoder's thread then waits for a forward, having begun none."""
        before = self.lane.waits
        act() if act else self.ask(*requests)
        wait_until(lambda: self.lane.waits > before)
        assert len(self.lane.works) == len(self.begun)

    def looks_on(self):
        """The encoder's thread, which waits for a free lane or somebody better, looks again and begins nothing."""
        looks = self.lane.looks
        wait_until(lambda: self.lane.looks > looks + 2)
        assert len(self.lane.works) == len(self.begun)

    def close(self):
        """Whatever is left may run."""
        self.lane._launched = lambda work, stream: (work(), LaunchedWork())
        for _, work in self.lane.works:
            work.end.set()
        self.scheduler.close()


@pytest.fixture
def staged():
    made = []

    def start(**more):
        made.append(Stage(**more))
        return made[-1]

    yield start
    for stage in made:
        stage.close()


@pytest.fixture
def stage(staged):
    return staged()


@pytest.fixture
def last(stage):
    """The same while the last forward of a job is under way and nobody waits."""
    stage.end(0)
    stage.begins(False, REST)
    return stage


def test_a_question_is_answered_while_the_forward_of_a_job_is_under_way(stage):
    stage.ask([[40]])
    stage.begins(True, [40])
    stage.end(1)
    stage.answered(40)
    stage.end(0)
    stage.begins(False, REST)
    stage.end(2)
    stage.answered(40, 1)
    assert stage.answers == [(40, [40]), (1, JOB + REST)]


def test_who_could_not_go_beside_waits_for_both(stage):
    stage.ask([[40]])
    stage.begins(True, [40])
    stage.waits([[41, 42, 43]])
    stage.end(0)
    assert not stage.lane.free and len(stage.lane.works) == 2
    stage.end(1)
    stage.begins(False, [41, 42, 43])


def test_a_forward_waits_for_one_beside_the_last():
    lane, begun = HeldStreams(runner := TileRunner()), threading.Event()
    run = partial(runner.run, np.zeros((1, 2, 2, 3), np.uint8))
    lane.forward(run)
    lane.beside(run)
    thread = threading.Thread(target=lambda: (lane.forward(run), begun.set()))
    thread.start()
    lane.works[0][1].end.set()
    assert not begun.wait(0.05)
    lane.works[1][1].end.set()
    assert begun.wait(5)
    thread.join()


def test_a_second_question_waits_for_the_first(stage):
    stage.ask([[40]])
    stage.begins(True, [40])
    stage.waits([[41], [42]])
    stage.end(1)
    stage.begins(True, [41, 42])
    stage.end(2)
    stage.answered(40, 41)


@pytest.mark.parametrize("situation", ["stage", "last"])
def test_questions_that_come_together_go_as_many_as_fit(request, situation):
    stage = request.getfixturevalue(situation)
    stage.ask([[40]], [[41]], [[42]])
    stage.begins(True, [40, 41])
    stage.end(len(stage.begun) - 1)
    stage.begins(True, [42])


@pytest.mark.parametrize("picture", [[40, 41, 42], JOB])
def test_what_is_too_large_waits_for_the_forward(staged, picture):
    stage = staged(cache=8)
    stage.waits([picture])
    stage.end(0)
    # A known one, as the job's own is as soon as its forward is launched, needs none: the second is the job's.
    stage.begins(False, REST if picture == JOB else picture)


def test_a_small_known_picture_waits_and_is_not_computed_again(staged):
    stage = staged(cache=8)
    stage.ask([[40]])
    stage.begins(True, [40])
    assert stage.lane.in_order_from == ["first", "second"]
    stage.end(1)
    stage.waits([[40]])
    stage.end(0)
    stage.begins(False, REST)
    stage.answered(40, 40)


def test_a_ping_waits_for_the_forward(stage):
    """Its answer says that the device works."""
    stage.waits(act=lambda: stage.scheduler.ping(Job("ping", [], stage.answers)))
    assert not stage.answers
    stage.end(0)
    stage.answered("ping")


def test_nobody_of_the_jobs_own_priority_goes_beside_it(stage):
    stage.ask([[40]], priority=10)
    stage.looks_on()
    stage.end(0)
    stage.begins(False, REST)
    stage.end(1)
    stage.begins(False, [40])


def test_after_a_ping_which_needs_no_forward_a_question_still_goes_beside_one(last):
    last.scheduler.ping(Job("ping", [], last.answers))
    wait_until(lambda: not len(last.scheduler.queue))
    last.ask([[40]])
    last.begins(True, [40])
    assert not last.answers  # the ping's comes behind the job's


def test_nobody_goes_beside_a_forward_of_its_own_priority_that_passes_a_job(stage):
    stage.waits([[40, 41, 42]])
    stage.end(0)
    stage.begins(False, [40, 41, 42])
    stage.waits([[43]])
    stage.end(1)
    stage.begins(False, [43])


def test_nothing_runs_beside_a_forward_as_small_as_itself(last):
    last.end(1)
    last.answered(1)
    last.ask([[20], [21]], priority=10)
    last.begins(False, [20, 21])
    last.waits([[40]])
    last.end(2)
    last.begins(False, [40])


@pytest.mark.parametrize(("beside", "expects"), [(0, True), (2, False)])
def test_where_the_runner_cannot_or_no_question_came_of_late_everyone_waits(staged, beside, expects):
    """Without looking again and again."""
    stage = staged(beside=beside, expects=expects)
    wait_until(lambda: stage.lane.waits == 3)  # twice before the first forward, now before the second
    stage.ask([[40]])
    assert stage.lane.looks == 1
    stage.end(0)
    stage.begins(False, [40])


def test_who_finds_no_room_for_its_rows_waits(staged):
    stage = staged(budget=RowBudget(BYTES, 11 * BYTES))
    stage.waits([[40]])
    stage.end(0)
    stage.begins(False, REST)


def test_an_error_beside_fails_its_own_request_only(staged):
    stage = staged(budget=RowBudget(BYTES, 100 * BYTES))
    stage.ask([[50]])  # which melts the card
    stage.answered(50)
    stage.ask([[40]])
    stage.begins(True, [40])
    stage.end(1)
    stage.answered(50, 40)
    stage.close()
    assert [(name, str(outcome)) for name, outcome in stage.answers] == [
        (50, "the card melted"), (40, "[40]"), (1, str(JOB + REST))
    ]  # fmt: skip
    assert stage.scheduler.encoder.budget.used_bytes == 0


def test_on_the_cpu_no_forward_is_ever_under_way():
    lane, kept = DeviceStreams(), []
    rows, work = lane.beside(lambda: torch.ones(TOKENS))
    lane.in_order(lambda: kept.append(rows), rows)
    assert work.done and lane.free and len(kept) == 1
