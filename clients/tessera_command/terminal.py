"""What commands show on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def console() -> Any:
    """For tables."""
    from rich.console import Console

    return Console(stderr=True)


PLAIN_S = 10.0


def _plain(what: str) -> Callable[..., None]:
    last = -math.inf

    def advance(done: int, total: int, rate: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now >= last + PLAIN_S or done == total:
            last = now
            print(f"{what}: {done} of {total}{f', {rate}' if rate else ''}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """A bar, driven by (done, total) or (done, total, how fast); the time left goes by what is done after the first.

    Where standard error is no terminal, lines: the first, the last, and one every PLAIN_S seconds.
    """
    if not console().is_terminal:
        yield _plain(what)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    description, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = (description, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def advance(done: int, total: int, rate: str = "") -> None:
            if bar.tasks[0].total is None:
                bar.reset(task, total=total, completed=done, rate=rate)
            else:
                bar.update(task, completed=done, total=total, rate=rate)

        yield advance
