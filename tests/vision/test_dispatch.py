"""Forwards and waves are cut independently of each other, and every request is answered exactly once."""

from __future__ import annotations

import gc
import threading

import pytest
from fakes.backend import wait_until
from test_encoder import TOKENS, CountingRunner, TileFamily, item, tiles_of

from tessera.errors import InvalidRequest
from tessera.vision.encoder import VisionEncoder
from tessera.vision.memory import RowBudget
from tessera.vision.pictures import Picture
from tessera.vision.scheduler import VisionScheduler

BYTES = TOKENS * 2 * 4  # of a tile's rows
# Pictures' tiles a request: big ones to be split, small ones to be merged, one without pictures, two with several.
REQUESTS = [[[1, 2, 3]], [[4]], [], [[5]], [[6], [7, 8]], [[9]], [[10, 11, 12, 13, 14]], [[15]], [[16]], [[17], [18]]]
TILES = sum(len(picture) for request in REQUESTS for picture in request)


class Job:
    """What a stage's job is to the dispatcher, with the order of all answers."""

    deadline_ns = 0

    def __init__(self, number, pictures, answers, priority=0):
        self.number, self.item, self.answers, self.priority = number, item(*pictures), answers, priority

    def begin(self):
        pass

    def answer(self, rows):
        self.answers.append((self.number, None if rows is None else tiles_of(rows)))

    def fail(self, error):
        self.answers.append((self.number, error))


class FailingRunner(CountingRunner):
    """Fails from the forward with this tile on."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def run(self, tiles, wires=()):
        if self.at in tiles[:, 0, 0, 0]:
            raise RuntimeError("the card melted")
        return super().run(tiles)


def dispatched(runner, infer, requests=REQUESTS, **more):
    """All answers in their order, once the dispatcher is closed."""
    answers = []
    encoder = VisionEncoder(runner, TileFamily(), infer, **more)
    dispatcher = VisionScheduler(encoder)
    dispatcher.encode([Job(number, pictures, answers) for number, pictures in enumerate(requests)])
    dispatcher.close()
    return answers


def launched(infer):
    """(index, forwards run so far) of each request."""
    encoder = VisionEncoder(CountingRunner(), TileFamily(), infer)
    items = [item(*pictures) for pictures in REQUESTS]
    return [(pending.index, len(encoder.runner.batches)) for pending in encoder.launch(items)]


@pytest.mark.parametrize("infer", [1, 8, 32])
def test_everyone_is_answered_once_whatever_the_sizes(infer):
    runner = CountingRunner()
    answers = dict(dispatched(runner, infer))
    assert len(answers) == len(REQUESTS)
    for number, pictures in enumerate(REQUESTS):
        assert answers[number] == ([tile for picture in pictures for tile in picture] or None)
    assert sum(runner.batches) == TILES
    assert all(count == infer for count in runner.batches[:-1]) and runner.batches[-1] <= infer


def test_forwards_are_cut_and_requests_go_out_independently():
    # One tile a forward: each goes out with its last tile; without pictures at once.
    order = [2, 0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert launched(1) == list(zip(order, [0, 3, 4, 5, 8, 9, 14, 15, 16, 18], strict=True))
    # Forwards end after tiles 8, 16 and 18.
    assert launched(8) == list(zip(order, [0, 1, 1, 1, 1, 2, 2, 2, 2, 3], strict=True))
    # All in one forward, still one by one.
    assert launched(32) == list(zip(order, [0] + [1] * 9, strict=True))


@pytest.mark.parametrize("infer", [1, 8, 32])
@pytest.mark.parametrize("at", [1, 8, 14, 18])
def test_an_error_in_the_middle_ends_the_rest_and_keeps_what_was_done(infer, at):
    budget = RowBudget(BYTES, TILES * BYTES)
    runner = FailingRunner(at)
    answers = dispatched(runner, infer, budget=budget)
    assert sorted(number for number, _ in answers) == list(range(len(REQUESTS)))
    computed = sum(runner.batches)
    for number, outcome in answers:
        last = max((tile for picture in REQUESTS[number] for tile in picture), default=0)
        assert (str(outcome) == "the card melted") == (last > computed)
    assert budget.used_bytes == 0


def test_a_failing_answer_fails_its_own_request_only():
    answers = []

    class Clumsy(Job):
        def answer(self, rows):
            raise OSError("no shared memory")

    budget = RowBudget(BYTES, 100 * BYTES)
    dispatcher = VisionScheduler(VisionEncoder(CountingRunner(), TileFamily(), budget=budget))
    dispatcher.encode([Clumsy(0, [[1]], answers), Job(1, [[2]], answers)])
    dispatcher.close()
    assert [(number, str(outcome)) for number, outcome in answers] == [(0, "no shared memory"), (1, "[2]")]
    assert budget.used_bytes == 0


def test_the_next_batch_is_computed_while_answers_are_being_sent():
    entered, release, answers = threading.Event(), threading.Event(), []

    class Slow(Job):
        def answer(self, rows):
            entered.set()
            assert release.wait(5)
            super().answer(rows)

    runner = CountingRunner()
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily()))
    dispatcher.encode([Slow(0, [[1]], answers)])
    assert entered.wait(5)
    dispatcher.encode([Job(1, [[2]], answers)])
    wait_until(lambda: runner.batches == [1, 1], 5)
    assert answers == []
    release.set()
    dispatcher.close()
    assert answers == [(0, [1]), (1, [2])]


def test_rows_are_gone_when_their_bytes_are_given_to_the_next_wave():
    vision = VisionEncoder(CountingRunner(), TileFamily(), 1, budget=RowBudget(BYTES, 2 * BYTES))
    living = []
    for pending in vision.launch([item([number]) for number in range(1, 7)]):
        with pending.rows():
            pass
        del pending
        gc.collect()
        living.append(sum(type(each) is Picture and each.rows is not None for each in gc.get_objects()))
    assert len(living) == 6 and max(living) == 2


def test_rows_that_exceed_the_budget_together_go_in_waves():
    held, peaks = RowBudget(BYTES, 5 * BYTES), []
    runner = CountingRunner()
    run = runner.run
    runner.run = lambda tiles, wires: peaks.append(held.used_bytes) or run(tiles)
    answers = []
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily(), 4, budget=held))
    dispatcher.encode([Job(number, pictures, answers) for number, pictures in enumerate(REQUESTS)])
    dispatcher.close()
    assert len(answers) == len(REQUESTS) and not any(isinstance(outcome, Exception) for _, outcome in answers)
    assert max(peaks) == 5 * BYTES and dispatcher.used_bytes == 0
    # Waves of 5, 4, 5 and 4 tiles; no forward is cut across two of them.
    assert runner.batches == [4, 1, 4, 4, 1, 4]


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    dispatcher = VisionScheduler(VisionEncoder(CountingRunner(), TileFamily(), budget=RowBudget(1 << 20, 5 << 20)))
    dispatcher.check(item([1, 2, 3], [4, 5]))
    with pytest.raises(InvalidRequest, match=r"6 tiles need 6.0 MiB .* has 5.0 MiB, which is 5 tiles.*gpu_memory"):
        dispatcher.check(item([1, 2, 3], [4, 5, 6]))
    dispatcher.close()


def test_rows_are_independent_of_the_pixels_memory():
    """A stage's pixels are the server's memory, which it takes back when execute() returns."""
    answers = []
    dispatcher = VisionScheduler(VisionEncoder(CountingRunner(), TileFamily()))
    job = Job(0, [[7]], answers)
    pixels = job.item.pixels
    dispatcher.encode([job])
    pixels[:] = 0
    dispatcher.close()
    assert answers == [(0, [7])]


class HeldRunner(CountingRunner):
    """Notes the tiles of each forward, and calls ``during`` with its number while it runs."""

    def __init__(self, during):
        super().__init__()
        self.during, self.forwards = during, []

    def run(self, tiles, wires=()):
        self.forwards.append(tiles[:, 0, 0, 0].tolist())
        self.during(len(self.forwards))
        return super().run(tiles)


def passed(coming, **more):
    """The forwards of a job of 24 tiles, while whose n-th forward ``coming[n]`` is asked: {n: jobs}."""
    answers = []
    runner = HeldRunner(lambda number: dispatcher.encode(coming(answers).get(number, [])))
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily(), 8, **more))
    dispatcher.encode([Job(number, [[3 * number + tile for tile in range(1, 4)]], answers, 10) for number in range(8)])
    wait_until(lambda: len(answers) >= 8, 5)
    dispatcher.close()
    return runner.forwards, [number for number, _ in answers]


def test_a_better_priority_passes_between_two_forwards():
    def coming(answers):
        return {1: [Job("question", [[40]], answers), Job("next", [[41]], answers), Job("late", [[42]], answers, 10)]}

    forwards, order = passed(coming)
    # The job's own forwards are as large as ever within the batch that was begun.
    assert forwards == [list(range(1, 9)), [40, 41], list(range(9, 17)), list(range(17, 25)), [42]]
    # Those that pass have a sender of their own.
    assert [number for number in order if number in ("question", "next")] == ["question", "next"]
    assert [number for number in order if number not in ("question", "next")] == [*range(8), "late"]


def test_who_passes_must_fit_beside_those_that_wait():
    def coming(answers):
        return {1: [Job("question", [list(range(30, 54))], answers)]}

    forwards, order = passed(coming, budget=RowBudget(BYTES, 24 * BYTES))
    assert [tile for tiles in forwards for tile in tiles] == [*range(1, 25), *range(30, 54)]
    assert order == [*range(8), "question"]


def test_a_ping_passes_everyone_and_goes_by_both_threads():
    forwards_before = []

    class Ping(Job):
        def answer(self, rows):
            forwards_before.append(threading.current_thread().name)
            super().answer(rows)

    def during(number):
        if number == 1:
            dispatcher.ping(Ping("ping", [], answers))

    answers = []
    runner = HeldRunner(during)
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily(), 1))
    dispatcher.encode([Job(number, [[number]], answers, -7) for number in range(1, 5)])
    dispatcher.close()
    assert [number for number, _ in answers] == [1, "ping", 2, 3, 4]  # behind those that others wait for too
    assert [name.startswith("vision_encoder-send") for name in forwards_before] == [True]


def test_a_job_whose_time_ran_out_in_the_queue_costs_no_forward():
    runner, answers = CountingRunner(), []
    dispatcher = VisionScheduler(VisionEncoder(runner, TileFamily()))
    late = Job(0, [[1]], answers)
    late.deadline_ns = 7
    dispatcher.encode([late, Job(1, [[2]], answers)])
    dispatcher.close()
    assert [type(outcome) for _, outcome in answers] == [TimeoutError, list] and runner.batches == [1]
