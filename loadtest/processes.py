"""Functions that run side by side, each in a new process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any


def in_processes(tasks: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
    """Runs each task, a function and its arguments, in a new process, all at once; their results in order.

    No process is left afterwards, whatever happens.

    Raises:
        RuntimeError: one of them died or failed; says how.
        TimeoutError: they were not all done after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("spawn")
    results: dict[int, Any] = {}
    processes = []
    waiting: dict[Any, int] = {}
    deadline = time.monotonic() + timeout
    try:
        for number, task in enumerate(tasks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_report, args=(theirs, *task), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # so that the end of the process is the end of the pipe
            waiting[ours] = number
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(waiting)} processes were not done after {timeout:g} s")
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    results[number], error = pipe.recv()
                except EOFError:
                    error = "it died"
                if error:
                    raise RuntimeError(f"the process of {tasks[number][0].__name__} failed: {error}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[number] for number in range(len(tasks))]


def _report(pipe: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        pipe.send((function(*arguments), None))
    except Exception as error:
        traceback.print_exc()
        pipe.send((None, f"{type(error).__name__}: {error}"))
