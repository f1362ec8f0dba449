"""The client and its asyncio twin against a transport that plays scripts: retries, deadlines, cancellation, order."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from fake_transport import FakeTransport, Hang, final
from fakes.answering_server import AnsweringServer

from tessera_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    Delta,
    InvalidRequest,
    ProtocolError,
    Retry,
    ServerError,
    TesseraClientError,
    Unavailable,
)

QUICK = Retry(attempts=3, first_delay=0.001, max_delay=0.002)


def client(*script: Sequence[Any], **options: Any) -> tuple[Client, FakeTransport]:
    fake = FakeTransport(script)
    return Client(transport=fake, retry=options.pop("retry", QUICK), **options), fake


def test_unavailable_is_retried_with_a_new_id() -> None:
    asker, fake = client([Unavailable("queue is full")], [ConnectionFailed("refused")], [final("yes")])
    answer = asker.ask(None, "q")
    assert answer.text == "yes" and answer.attempts == 3
    ids = [request_id for _, request_id, _ in fake.requests]
    assert len(set(ids)) == 3 and answer.request_id == ids[-1]


@pytest.mark.parametrize(
    ("script", "error", "attempts"),
    [
        ([[Unavailable(f"full {i}")] for i in range(5)], "full 2", 3),
        ([[InvalidRequest("no")]], "no", 1),
        ([[ServerError("broken")]], "broken", 1),
        ([[ProtocolError("what")]], "what", 1),
        ([[Delta("a"), Unavailable("stopping")]], "stopping", 1),  # a token was given out
        ([[Delta("a")]], "the server ended the stream without a finish reason", 1),
        ([[Delta("a"), final("", "error")]], "the language model failed", 1),
    ],
)
def test_what_is_not_retried_or_not_again(script: Any, error: str, attempts: int) -> None:
    asker, fake = client(*script)
    with pytest.raises(TesseraClientError, match=error):
        asker.ask(None, "q")
    assert len(fake.requests) == attempts


def test_retry_waits_grow_and_are_capped() -> None:
    retry = Retry(attempts=9, first_delay=0.1, max_delay=1.0)
    for failed, whole in ((1, 0.1), (2, 0.2), (3, 0.4), (8, 1.0)):
        waits = [retry.delay(failed, Unavailable("x")) or 0 for _ in range(50)]
        assert whole / 2 <= min(waits) and max(waits) <= whole and len(set(waits)) > 1
    assert retry.delay(9, Unavailable("x")) is None
    assert retry.delay(1, ServerError("x")) is None


def test_deadline_names_its_length_and_cancels_on_the_server() -> None:
    asker, fake = client([Hang()])
    for timeout in ("0.1", "0"):
        with pytest.raises(DeadlineExceeded, match=f"within {timeout} s"):
            asker.ask(None, "q", timeout=float(timeout))
    assert fake.cancelled == [fake.requests[0][1]]


def test_leaving_a_stream_early_cancels_on_the_server() -> None:
    asker, fake = client([Delta("a"), Delta("b"), final()])
    with asker.stream(None, "q"):  # never started
        pass
    with asker.stream(None, "q") as stream:
        next(stream)
    assert fake.cancelled == [fake.requests[0][1]]
    with pytest.raises(Cancelled):
        next(stream)
    stream.close()  # again: nothing more
    assert len(fake.cancelled) == 1


def test_ask_many_reads_only_a_little_ahead() -> None:
    read: list[int] = []

    def endless() -> Any:
        i = 0
        while True:
            read.append(i)
            yield None, str(i)
            i += 1

    answers = Client(transport=FakeTransport()).ask_many(endless(), concurrency=2)
    assert [next(answers).text for _ in range(3)] == [f"answer to {i}" for i in range(3)]
    answers.close()
    assert len(read) <= 3 + 4 * 2


def test_ask_many_raises_or_returns_errors() -> None:
    asker = Client(transport=AnsweringServer(**{"3": [InvalidRequest("three is wrong")]}))
    items = [(None, str(i)) for i in range(6)]
    ended: list[int] = []
    results = list(asker.ask_many(items, concurrency=2, errors="return", progress=ended.append))
    assert isinstance(results[3], InvalidRequest) and ended == [1, 2, 3, 4, 5, 6]
    assert [str(r) for i, r in enumerate(results) if i != 3] == [f"answer to {i}" for i in (0, 1, 2, 4, 5)]
    got = []
    with pytest.raises(InvalidRequest, match="three"):
        for answer in asker.ask_many(items, concurrency=2):
            got.append(answer.text)
    assert got == [f"answer to {i}" for i in range(3)]


pytestmark = pytest.mark.anyio


def async_client(*script: Sequence[Any], fake: FakeTransport | None = None) -> tuple[AsyncClient, FakeTransport]:
    fake = fake or FakeTransport(script)
    return AsyncClient(transport=fake, retry=QUICK), fake


async def test_stream_and_early_leave() -> None:
    asker, fake = async_client([Delta("a"), Delta("b"), final()], [Delta("a", logprobs=[1]), final("b")])
    async with asker.stream(None, "q") as stream:
        assert (await stream.__anext__()).text == "a"
    assert fake.cancelled == [fake.requests[0][1]]
    async with asker.stream(None, "q") as stream:
        assert [delta.text async for delta in stream] == ["a", "b"]
        answer = await stream.answer()
        assert answer.text == stream.text == "ab" and answer.logprobs == [1]
    assert len(fake.cancelled) == 1


@pytest.mark.parametrize("ticks", range(4))
async def test_a_token_that_comes_at_that_moment_does_not_undo_the_cancel(ticks: int) -> None:
    """Before Python 3.12 asyncio.wait_for forgets the cancel then, and the task would wait for the next token."""
    asker, _ = async_client([Hang()])
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


async def test_ask_many_keeps_order_and_errors_in_place() -> None:
    asker, _ = async_client(fake=AnsweringServer(**{"3": [InvalidRequest("three is wrong")]}))
    seen: list[int] = []
    items = [(None, str(i)) for i in range(20)]
    results = [r async for r in asker.ask_many(items, concurrency=3, errors="return", progress=seen.append)]
    assert isinstance(results[3], InvalidRequest)
    assert [str(r) for i, r in enumerate(results) if i != 3] == [f"answer to {i}" for i in range(20) if i != 3]
    assert seen == list(range(1, 21))
    with pytest.raises(InvalidRequest):
        async for _ in asker.ask_many(items, concurrency=3):
            pass


async def test_leaving_ask_many_early_cancels_what_was_begun() -> None:
    asker, fake = async_client([final("a")], [Hang()], [Hang()])
    async with contextlib.aclosing(asker.ask_many([(None, "q")] * 3, timeout=None)) as answers:
        assert (await anext(answers)).text == "a"
    assert sorted(fake.cancelled) == sorted(request_id for _, request_id, _ in fake.requests[1:])
