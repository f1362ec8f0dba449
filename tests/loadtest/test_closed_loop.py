"""The load really has the concurrency it says, over all its processes together."""

import multiprocessing
import os
import time
from contextlib import contextmanager
from typing import Any

import closed_loop
import pytest
from closed_loop import Reply, in_processes, users_at


class Together:
    """A server of ``concurrency`` seats: nobody is answered before all are taken. Counts those in flight."""

    def __init__(self, concurrency: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._seats: Any = context.Barrier(concurrency)
        self._in_flight: Any = context.Value("i", 0)
        self._most: Any = context.Value("i", 0)

    @property
    def most(self) -> int:
        return self._most.value

    @contextmanager
    def prepare(self, number: int, stock: int):
        yield self.ask

    def ask(self) -> Reply:
        with self._in_flight.get_lock():
            self._in_flight.value += 1
            self._most.value = max(self._most.value, self._in_flight.value)
        self._seats.wait(60)
        with self._in_flight.get_lock():
            self._in_flight.value -= 1
        self._seats.wait(60)
        return Reply(None, 4)


@pytest.mark.parametrize(("concurrency", "processes"), [(7, 3), (2, 6), (3, 0)])
def test_exactly_so_many_are_in_flight_until_the_last_are_begun(concurrency, processes):
    # Were there ever fewer, the seats would not fill and the run would fail; were there more, the most would show it.
    server = Together(concurrency)
    began, answers = closed_loop.run(server.prepare, concurrency, 6 * concurrency, processes)
    assert server.most == concurrency
    assert len(answers) == 6 * concurrency
    assert [answer.ended for answer in answers] == sorted(answer.ended for answer in answers)
    assert answers[0].ended - answers[0].seconds >= began
    assert {(answer.first_token, answer.tokens) for answer in answers} == {(None, 4)}


class Failing:
    @contextmanager
    def prepare(self, number: int, stock: int):
        def ask() -> Reply:
            raise ConnectionError("no server here")

        yield ask


def test_a_failed_request_ends_the_run_and_is_named():
    with pytest.raises(RuntimeError, match="ConnectionError: no server here"):
        closed_loop.run(Failing().prepare, 4, 40, 2)


@pytest.mark.parametrize(
    ("task", "timeout", "error", "why"),
    [
        ((os._exit, 3), 60, RuntimeError, "terminated abruptly"),
        ((time.sleep, 600), 0.5, TimeoutError, "not done after 0.5 s"),
    ],
)
def test_no_process_stays_behind(task, timeout, error, why):
    with pytest.raises(error, match=why):
        in_processes([task, (time.sleep, 600)], timeout)
    assert multiprocessing.active_children() == []


# ---- Locust's shapes

MOST = 40
SHARES = [step / 20 for step in range(21)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("steady", [40] * 21),
        ("ramp", [1, 2, 5, 8, 10, 12, 15, 18, 20, 22, 25, 28, 30, 32, 35, 38, 40, 40, 40, 40, 40]),
        ("spike", [10] * 8 + [40] * 4 + [10] * 9),
    ],
)
def test_users_by_the_share_of_the_run(shape: str, expected: list[int]) -> None:
    assert [users_at(shape, share, MOST) for share in SHARES] == expected
    assert {users_at(shape, share, 1) for share in SHARES} == {1}
