"""The asyncio twin behaves as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fake_transport import FakeTransport, Hang, final
from fakes.answering_server import AnsweringServer

from tessera_client import AsyncClient, Cancelled, Delta, InvalidRequest, Retry

pytestmark = pytest.mark.anyio

QUICK = Retry(attempts=3, first_delay=0.001, max_delay=0.002)


def client(*script: Sequence[Any], fake: FakeTransport | None = None) -> tuple[AsyncClient, FakeTransport]:
    fake = fake or FakeTransport(script)
    return AsyncClient(transport=fake, retry=QUICK), fake


async def test_stream_and_early_leave() -> None:
    asker, fake = client([Delta("a"), Delta("b"), final()], [Delta("a"), final("b")])
    async with asker.stream(None, "q") as stream:
        assert (await stream.__anext__()).text == "a"
    assert fake.cancelled == [fake.requests[0][1]]
    async with asker.stream(None, "q") as stream:
        assert [delta.text async for delta in stream] == ["a", "b"]
        assert (await stream.answer()).text == stream.text == "ab"
    assert len(fake.cancelled) == 1


async def test_cancelling_the_task_cancels_on_the_server() -> None:
    asker, fake = client([Hang()])
    task = asyncio.ensure_future(asker.ask(None, "q", timeout=30))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.cancelled == [fake.requests[0][1]]


@pytest.mark.parametrize("ticks", range(4))
async def test_a_token_that_comes_at_that_moment_does_not_undo_the_cancel(ticks: int) -> None:
    """Before Python 3.12 asyncio.wait_for forgets the cancel then, and the task would wait for the next token."""
    asker, _ = client([Hang()])
    async with asker.stream(None, "q", timeout=30) as stream:
        task = asyncio.ensure_future(stream.__anext__())
        while stream._inbox is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream._inbox.put(Delta("a"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_close_from_another_task_ends_the_stream() -> None:
    asker, fake = client([Delta("a"), Hang()])
    stream = asker.stream(None, "q", timeout=30)
    task = asyncio.ensure_future(stream.answer())
    await asyncio.sleep(0.05)
    await stream.close()
    with pytest.raises(Cancelled):
        await task
    assert len(fake.cancelled) == 1


async def test_ask_many_keeps_order_and_errors_in_place() -> None:
    asker, _ = client(fake=AnsweringServer(**{"3": [InvalidRequest("three is wrong")]}))
    seen: list[int] = []
    items = [(None, str(i)) for i in range(20)]
    results = [r async for r in asker.ask_many(items, concurrency=3, errors="return", progress=seen.append)]
    assert isinstance(results[3], InvalidRequest)
    assert [str(r) for i, r in enumerate(results) if i != 3] == [f"answer to {i}" for i in range(20) if i != 3]
    assert seen == list(range(1, 21))
    with pytest.raises(InvalidRequest):
        async for _ in asker.ask_many(items, concurrency=3):
            pass
