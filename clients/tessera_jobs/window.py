"""A window of rows under way, whatever a row is: :func:`for_each`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


async def for_each(
    rows: AsyncGenerator[T, None],
    work: Callable[[T], Awaitable[None]],
    most: int,
    slot: AbstractAsyncContextManager[Any] | None = None,
) -> None:
    """Does ``work`` on every row, on up to ``most`` of them at a time; a row is read when its turn has come.

    ``slot``: held from before a row is read until its work is done: a semaphore that several jobs share, say. The
    first error ends all; it is raised when everything else has ended.
    """
    slot, turn = slot or nullcontext(), asyncio.Lock()

    async def take_turns() -> None:
        while True:
            async with slot:
                async with turn:
                    row = await anext(rows, _END)
                if row is _END:
                    return
                await work(row)

    async with aclosing(rows):
        tasks = [asyncio.ensure_future(take_turns()) for _ in range(most)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end(tasks)


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels them, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
