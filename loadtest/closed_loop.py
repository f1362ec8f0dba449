"""A closed loop: a fixed number of requests in flight, kept up by several processes.

Concurrency is exact over all processes together: from the common start until the last ``concurrency`` requests are
begun, this many are in flight, no more and no fewer.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

PATIENCE_S = 500.0


class Reply(NamedTuple):
    """A whole answer. ``first``: time.perf_counter() when its first part came, None where it was not streamed;
    ``stages``: what the server says it spent where, in milliseconds; ``made_of``: the answers that this one sums up;
    ``kind``: which of several it was, of a load that mixes them."""

    first: float | None
    tokens: int
    parts: int = 1
    stages: tuple[float, ...] = ()
    made_of: tuple[Answered, ...] = ()
    kind: str = ""


class Answered(NamedTuple):
    """When a request ended (time.perf_counter(), which all processes share), and what it took, in seconds."""

    ended: float
    seconds: float
    first_token: float | None
    """Seconds to the first token; None where the answer was not streamed."""
    tokens: int
    parts: int
    stages: tuple[float, ...] = ()
    made_of: tuple[Answered, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, reply: Reply, began: float) -> Answered:
        """A reply that has just come to what was begun then (time.perf_counter())."""
        ended = time.perf_counter()
        first = None if reply.first is None else reply.first - began
        return cls(ended, ended - began, first, *reply[1:])


SECONDS: dict[str, float | None] = {"steady": None, "ramp": 120.0, "spike": 120.0, "soak": 1800.0, "mix": None}
"""By its shape, how long a run lasts that is not told; None: until it is stopped."""
SPIKE = (0.4, 0.6)
QUIET = 0.25

Ask = Callable[[], Reply]
Prepare = Callable[[int, int], AbstractContextManager[Ask]]
"""(number of the process, requests it may be asked for) -> what sends one request, from any thread, and waits for its
answer. Called in each process before the common start: the place to make pictures and connections."""


def _share(
    number: int, callers: int, stock: int, prepare: Prepare, start: Any, left: Any
) -> tuple[float, list[Answered]]:
    """One process's part of the load: this many threads that take the next of the requests left for all processes.

    Returns the common start, and the answers of this process.
    """
    answers: list[Answered] = []
    stopped = threading.Event()

    def call(ask: Ask) -> None:
        while not stopped.is_set():
            with left.get_lock():
                if left.value == 0:
                    return
                left.value -= 1
            began = time.perf_counter()
            try:
                reply = ask()
            except BaseException:
                stopped.set()
                raise
            answers.append(Answered.of(reply, began))

    with prepare(number, stock) as ask, ThreadPoolExecutor(callers) as pool:
        start.wait(PATIENCE_S)
        began = time.perf_counter()
        for caller in [pool.submit(call, ask) for _ in range(callers)]:
            caller.result()
    return began, answers


def shares(total: int, parts: int) -> list[int]:
    """The total cut into whole numbers that differ by one at most."""
    return [total // parts + (number < total % parts) for number in range(parts)]


def run(prepare: Prepare, concurrency: int, requests: int, processes: int) -> tuple[float, list[Answered]]:
    """Sends this many requests; when the first was begun (time.perf_counter()), and the answers in order of their ends.

    Args:
        processes: of the load; 0 is this one, for short runs, whose processes would take longer to start.

    Raises:
        RuntimeError: a request failed; names the first error of its process. In this process the error itself comes.
        TimeoutError: the load took more than ten minutes.
    """
    if not processes:
        left = multiprocessing.Value("q", requests)
        began, answers = _share(0, concurrency, requests, prepare, threading.Barrier(1), left)
        return began, sorted(answers)
    context = multiprocessing.get_context("spawn")
    callers = shares(concurrency, min(processes, concurrency))
    start, left = context.Barrier(len(callers)), context.Value("q", requests)
    tasks = []
    for number, count in enumerate(callers):
        stock = -(-requests * count // concurrency) + count  # any process may answer a little more than its share
        tasks.append((_share, number, count, stock, prepare, start, left))
    results = in_processes(tasks, 1.2 * PATIENCE_S)
    return min(began for began, _ in results), sorted(answer for _, answers in results for answer in answers)


_tasks: Sequence[tuple[Any, ...]] = ()
"""In a process of :func:`in_processes`: the tasks of all of them, for barriers and values are only inherited."""


def _inherit(tasks: Sequence[tuple[Any, ...]]) -> None:
    global _tasks
    _tasks = tasks


def _run_task(number: int) -> Any:
    function, *arguments = _tasks[number]
    return function(*arguments)


def in_processes(tasks: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
    """Runs each task, a function and its arguments, in a new process, all at once; their results in order.

    No process is left afterwards, whatever happens.

    Raises:
        RuntimeError: one of them died or failed; says how.
        TimeoutError: they were not all done after ``timeout`` seconds.
    """
    pool = ProcessPoolExecutor(len(tasks), multiprocessing.get_context("spawn"), _inherit, (tasks,))
    try:
        running = [pool.submit(_run_task, number) for number in range(len(tasks))]
        pool.submit(int)  # Python 3.11 looks only after the processes that there were before the newest task
        done, waiting = wait(running, timeout, FIRST_EXCEPTION)
        for each in done:
            if error := each.exception():
                raise RuntimeError(f"a process failed: {type(error).__name__}: {error}") from error
        if waiting:
            raise TimeoutError(f"{len(waiting)} processes were not done after {timeout:g} s")
        return [each.result() for each in running]
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown()


def users_at(shape: str, share: float, most: int) -> int:
    """Users when this share of the run has passed (0 to 1), of at most this many.

    steady: all of them; soak and mix too, which differ by how long they last and by what is asked. ramp: one after
    another, all of them in the last fifth. spike: a quarter, and all of them in the middle fifth.
    """
    if shape == "ramp":
        return max(1, min(most, round(most * share / 0.8)))
    if shape == "spike" and not SPIKE[0] <= share < SPIKE[1]:
        return max(1, round(most * QUIET))
    return most
