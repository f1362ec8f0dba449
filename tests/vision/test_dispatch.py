"""Every request is answered exactly once, by rank; those of a better priority pass between two forwards."""

import threading

import pytest
from fakes.backend import wait_until
from vision_fakes import BYTES, Job, TileRunner, encoder, item

from tessera.errors import InvalidRequest
from tessera.vision.memory import RowBudget
from tessera.vision.scheduler import VisionScheduler


@pytest.fixture
def started():
    """Makes a scheduler of a runner; all end with the test."""
    made = []

    def start(runner=None, batch=4, **more):
        made.append(VisionScheduler(encoder(batch, runner=runner, **more)))
        return made[-1]

    yield start
    for scheduler in made:
        scheduler.close()


def test_a_failing_answer_fails_its_own_request_only(started):
    answers = []

    class Clumsy(Job):
        def answer(self, rows):
            raise OSError("no shared memory")

    scheduler = started(budget=RowBudget(BYTES, 100 * BYTES))
    scheduler.encode([Clumsy(0, [[1]], answers), Job(1, [[2]], answers)])
    scheduler.close()
    assert [(number, str(outcome)) for number, outcome in answers] == [(0, "no shared memory"), (1, "[2]")]
    assert scheduler.encoder.budget.used_bytes == 0


def test_the_next_batch_is_computed_while_answers_are_being_sent(started):
    entered, release, answers = threading.Event(), threading.Event(), []

    class Slow(Job):
        def answer(self, rows):
            entered.set()
            assert release.wait(5)
            super().answer(rows)

    scheduler = started(runner := TileRunner())
    scheduler.encode([Slow(0, [[1]], answers)])
    assert entered.wait(5)
    scheduler.encode([Job(1, [[2]], answers)])
    wait_until(lambda: runner.batches == [1, 1])
    assert answers == []
    release.set()
    scheduler.close()
    assert answers == [(0, [1]), (1, [2])]


def test_a_request_that_can_never_fit_is_refused_with_numbers(started):
    scheduler = started(budget=RowBudget(1 << 20, 5 << 20))
    scheduler.check(item([1, 2, 3], [4, 5]))
    with pytest.raises(InvalidRequest, match=r"6 tiles need 6.0 MiB .* has 5.0 MiB, which is 5 tiles.*gpu_memory"):
        scheduler.check(item([1, 2, 3], [4, 5, 6]))


def test_rows_are_independent_of_the_pixels_memory(started):
    """A stage's pixels are the server's memory, which it takes back when execute() returns."""
    answers, scheduler = [], started()
    job = Job(0, [[7]], answers)
    pixels = job.item.pixels
    scheduler.encode([job])
    pixels[:] = 0
    scheduler.close()
    assert answers == [(0, [7])]


def test_a_better_priority_passes_between_two_forwards(started):
    """While the first of three forwards of a job runs, whose own are as large as before."""
    answers, passing = [], ["question", "next"]

    def during(number):
        if number == 1:
            coming = (("question", 40, 0), ("next", 41, 0), ("late", 42, 10))
            scheduler.encode([Job(name, [[tile]], answers, priority) for name, tile, priority in coming])

    scheduler = started(runner := TileRunner(during=during), 8)
    scheduler.encode([Job(number, [[3 * number + tile for tile in (1, 2, 3)]], answers, 10) for number in range(8)])
    wait_until(lambda: len(answers) == 11)
    assert runner.forwards == [[*range(1, 9)], [40, 41], [*range(9, 17)], [*range(17, 25)], [42]]
    order = [name for name, _ in answers]
    assert [name for name in order if name in passing] == passing  # by a sender of their own
    assert [name for name in order if name not in passing] == [*range(8), "late"]


def test_a_ping_passes_everyone_and_goes_by_both_threads(started):
    senders, answers = [], []

    class Ping(Job):
        def answer(self, rows):
            senders.append(threading.current_thread().name)
            super().answer(rows)

    def during(number):
        if number == 1:
            scheduler.ping(Ping("ping", [], answers))

    scheduler = started(TileRunner(during=during), 1)
    scheduler.encode([Job(number, [[number]], answers, -7) for number in range(1, 5)])
    wait_until(lambda: len(answers) == 5)
    assert [number for number, _ in answers] == [1, "ping", 2, 3, 4]  # behind those that others wait for too
    assert [name.startswith("vision_encoder-send") for name in senders] == [True]
