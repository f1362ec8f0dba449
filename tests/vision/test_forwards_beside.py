"""A question's forward begins while one of a job is under way, where the runner can, and nothing else changes."""

import random
import threading
import time

import pytest
import torch
from fakes.backend import wait_until
from vision_fakes import BYTES, TOKENS, Job, TileRunner, encoder

from tessera.vision.memory import DeviceStreams, LaunchedWork, RowBudget
from tessera.vision.scheduler import VisionScheduler

JOB, REST = list(range(1, 9)), [9, 10, 11]  # a job's two pictures: the first fills a forward
FIRST_QUESTION = 100  # tiles from here on are of questions, where a test says no more


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
        under_way = [(beside, held) for beside, held in self.works if not held.done]
        result = work()
        if len(self._runner.forwards) == before:
            return result, LaunchedWork()
        # A forward begins when all others have ended; one beside another when none is beside that.
        assert not [beside for beside, _ in under_way if beside or stream == "first"]
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

    def waits(self, *requests):
        """Asks; the encoder's thread then waits for a forward, having begun none."""
        before = self.lane.waits
        self.ask(*requests)
        wait_until(lambda: self.lane.waits > before)
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


@pytest.mark.parametrize("last", [False, True])
def test_questions_go_beside_the_forward_of_a_job_as_many_as_fit(staged, last):
    """``last``: nobody waits for the forward that is under way. A ping, which has none, changes nothing."""
    stage = staged()
    if last:
        stage.end(0)
        stage.begins(False, REST)
        stage.scheduler.ping(Job("ping", [], stage.answers))
        wait_until(lambda: not len(stage.scheduler.queue))
    first = len(stage.begun)
    stage.ask([[40]], [[41]], [[42]])
    stage.begins(True, [40, 41])
    stage.end(first)
    stage.begins(True, [42])
    stage.waits([[43]])
    stage.end(first + 1)
    stage.begins(True, [43])
    stage.end(first + 2)
    stage.answered(40, 41, 42, 43)
    stage.end(first - 1)
    if not last:
        stage.begins(False, REST)
        stage.end(first + 3)
    stage.answered(40, 41, 42, 43, 1, *["ping"] * last)
    assert dict(stage.answers) == {1: JOB + REST, **{n: [n] for n in range(40, 44)}, **dict.fromkeys(["ping"] * last)}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_ends_in_any_order(staged, seed):
    """No forward begins beside one as small as itself, of its own priority, or where the runner cannot; every one waits
    for those before it, as HeldStreams sees to, and for room for its rows; all are answered."""
    dice, expected = random.Random(seed), {1: JOB + REST}
    budget = RowBudget(BYTES, dice.choice((11, 16, 1000)) * BYTES)
    stage = staged(cache=dice.choice((0, 8)), beside=dice.choice((0, 2, 2)), expects=bool(seed % 2), budget=budget)
    for number in range(2, 42):
        if dice.random() < 0.5:
            question = dice.random() < 0.7
            begin = dice.randrange(20) + FIRST_QUESTION * question
            expected[number] = tiles = [*range(begin, begin + dice.choice((1, 2, 5, 9)))]
            pictures = [tiles[:2], tiles[2:]] if len(tiles) > 2 else [tiles]
            stage.scheduler.encode([Job(number, pictures, stage.answers, 10 * (not question))])
        elif under_way := [held for _, held in stage.lane.works if not held.done]:
            dice.choice(under_way).end.set()
        time.sleep(0.002)  # the encoder's thread may act or not: what it does must be right either way

    def all_answered():
        for _, held in list(stage.lane.works):
            held.end.set()
        return len(stage.answers) >= len(expected)

    wait_until(all_answered)
    stage.scheduler.close()
    assert dict(stage.answers) == expected and len(stage.answers) == len(expected) and not budget.used_bytes
    before: list[int] = []
    for (beside, _), tiles in zip(stage.lane.works, stage.runner.forwards, strict=True):
        if not beside:
            before = tiles
            continue
        assert len(tiles) <= stage.runner.beside < len(before) and max(before) < FIRST_QUESTION <= min(tiles)


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


@pytest.mark.parametrize(("beside", "expects"), [(0, True), (2, False)])
def test_where_the_runner_cannot_or_no_question_came_before_nobody_looks_again_and_again(staged, beside, expects):
    stage = staged(beside=beside, expects=expects)
    wait_until(lambda: stage.lane.waits == 3)  # twice before the first forward, now before the second
    stage.ask([[40]])
    assert stage.lane.looks == 1
    stage.end(0)
    stage.begins(False, [40])


def test_an_error_beside_fails_its_own_request_only(staged):
    stage = staged(budget=RowBudget(BYTES, 100 * BYTES))
    stage.ask([[50]])  # which melts the card
    stage.answered(50)
    stage.close()
    assert [(name, str(outcome)) for name, outcome in stage.answers] == [(50, "the card melted"), (1, str(JOB + REST))]
    assert stage.scheduler.encoder.budget.used_bytes == 0


def test_on_the_cpu_no_forward_is_ever_under_way():
    lane, kept = DeviceStreams(), []
    rows, work = lane.beside(lambda: torch.ones(TOKENS))
    lane.in_order(lambda: kept.append(rows), rows)
    assert work.done and lane.free and len(kept) == 1
