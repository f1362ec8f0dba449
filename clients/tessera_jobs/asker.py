"""The questions of a batch job to servers that may go away under them: :class:`Asker`.

A row that fails asks whether its server is in order, by a question of one word. Where it is, the failure is the row's
own (or the server was busy). Where it is not, the row waits until one of the servers is, and is asked again. A row that
was under way each of several times that a server went away is asked alone, so that one that kills servers is told from
those beside it.

A window of rows under way, whatever a row is: :func:`for_each`.

One model for a whole job, whichever servers answer and however often they start again: a server that may have started
again is asked again which it has.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from itertools import count
from typing import Any, NamedTuple, TypeVar

from tessera_client.aio import AsyncClient
from tessera_client.messages import Answer, ServedModel
from tessera_client.retry import Retry
from tessera_wire.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    ServerError,
    TesseraClientError,
    Unavailable,
)

T = TypeVar("T")
_END: Any = object()

SUSPECT = 3  # times that a server went away under a row before it is asked alone
ALONE = 2  # times that it is then asked
BEGINNINGS = 3  # looks, and one for each server, before a job that has not begun says that it waits
TRIES = 2  # of a row that fails on a server in order
PAUSE_S = 0.25  # between two looks at servers that are away
BUSY = Retry()

Call = Callable[[AsyncClient], Awaitable[Answer]]
"""One attempt at a row, by this client; called again for each."""


class ServersUnavailable(Exception):
    """The job cannot go on: no server came back in time, or one came back with another model. ``error`` says it."""

    def __init__(self, error: TesseraClientError) -> None:
        super().__init__(str(error))
        self.error = error


def run_job(job: Coroutine[Any, Any, T]) -> T:
    """What comes of a job's coroutine. Raises the error of ServersUnavailable in its place."""
    try:
        return asyncio.run(job)
    except ServersUnavailable as away:
        raise away.error from away


class Outage(NamedTuple):
    """When a server was first found away and when it was in order again, in the order of events."""

    began: int
    ended: float = math.inf


NEVER = Outage(0, 0)


class OtherModel(InvalidRequest):
    """A server has another model than the job's others."""


class Asker:
    """Asks again what its client, which does not retry, could not ask.

    Args:
        patience: seconds that servers may be away.
        busy: seconds that servers in order may refuse a row; ``patience`` if not given.
        one_model: whether all answers are to come from one.
    """

    def __init__(
        self, client: AsyncClient, patience: float, busy: float | None = None, one_model: bool = False
    ) -> None:
        self._client, self._patience = client, patience
        self._looks = client.untraced()
        self._busy = patience if busy is None else busy
        self._one_model = one_model
        self._served: ServedModel | None = None
        self._known: dict[str, asyncio.Task[None]] = {}
        """Servers that have this model, or are asked."""
        self._waiting: asyncio.Task[str] | None = None
        self._looking: dict[str, asyncio.Task[bool]] = {}
        self._events = count(1)
        self._outages: dict[str, Outage] = {}
        """The last of each server that had one."""
        self._under_way = 0
        self._idle = asyncio.Event()  # nothing is under way
        self._alone = asyncio.Lock()

    async def begin(self, notice: Callable[[str], None] = lambda words: None) -> None:
        """Returns when a server is in order. ``notice`` is told once why it takes a while.

        Raises what the servers say where none is within ``patience``, and at once what waiting does not mend.
        """
        started, looks = time.monotonic(), len(self._client.servers) + BEGINNINGS
        for attempt in count(1):
            try:
                await self._look(self._looks)
                return
            except TesseraClientError as error:
                away = isinstance(error, (Unavailable, ConnectionFailed))
                if attempt >= looks and not (away and time.monotonic() - started < self._patience):
                    raise
                if attempt == looks:
                    notice(f"waiting up to {self._patience:g} s for {self._client.url}: {error.message}")
            await asyncio.sleep(PAUSE_S)

    async def model(self) -> ServedModel:
        """What the servers in order have. Raises OtherModel where they differ, and where none answers its error."""
        last: TesseraClientError | None = None
        for server in self._client.servers:
            try:
                await self._check_model(server)
            except (ConnectionFailed, Unavailable) as error:
                last = error
        if self._served is None:
            raise last or ConnectionFailed("there is no server")
        return self._served

    async def _check_model(self, server: str) -> None:
        """Raises OtherModel, and what the server fails with."""
        asked = self._known.get(server)
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() is not None)):
            asked = self._known[server] = asyncio.ensure_future(self._ask_model(server))
        await asyncio.shield(asked)

    async def _ask_model(self, server: str) -> None:
        try:
            served = await self._looks.only(server).served()
        except (InvalidRequest, ProtocolError) as error:
            words = f"{server} does not say which model it serves: {error.message}"
            raise ProtocolError(words, "start it with this client's version of Tessera") from error
        except TesseraClientError as error:
            error.server = server
            raise
        if self._served is None:
            self._served = served
        elif served != self._served:
            words = f"{server} serves another model ({described(served)}) than this job has been"
            raise OtherModel(f"{words} asking ({described(self._served)})", "give it servers of one model")

    async def ask(self, call: Call) -> Answer:
        """The answer. Raises the row's own error, or ServersUnavailable."""
        began, went_away = time.monotonic(), 0
        for attempt in count(1):
            if self._alone.locked():
                async with self._alone:
                    pass
            sent = next(self._events)
            try:
                return await self._ask_beside_others(call)
            except TesseraClientError as error:
                last = error
                if await self._went_away(error, sent):
                    began, went_away = time.monotonic(), went_away + 1
                    if went_away == SUSPECT:
                        break
                elif isinstance(error, (Unavailable, ConnectionFailed)):
                    delay = BUSY.delay(min(attempt, BUSY.attempts - 1), error)
                    if delay is None or time.monotonic() - began > self._busy:
                        raise ServersUnavailable(error) from error
                    await asyncio.sleep(delay)
                elif isinstance(error, InvalidRequest) or attempt >= TRIES:
                    raise
        return await self._ask_alone(call, last)

    async def _ask_beside_others(self, call: Call) -> Answer:
        self._under_way += 1
        self._idle.clear()
        try:
            return await self._whole(call(self._client))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _ask_alone(self, call: Call, last: TesseraClientError) -> Answer:
        async with self._alone:
            if self._under_way:
                await self._idle.wait()
            began, went_away = time.monotonic(), 0
            while went_away < ALONE:
                server = await self._wait_for_server(last)
                try:
                    return await self._whole(call(self._client.only(server)))
                except TesseraClientError as error:
                    last = error
                if not await self._in_order(server):
                    began, went_away = time.monotonic(), went_away + 1
                elif not isinstance(last, (Unavailable, ConnectionFailed)):
                    raise last
                elif time.monotonic() - began > self._busy:
                    raise ServersUnavailable(last) from last
                else:
                    await asyncio.sleep(PAUSE_S)
        raise ServerError(
            f"a server went away each of {SUSPECT + ALONE} times that this was asked, at last {ALONE} times with "
            f"nothing beside it: {last.message}"
        )

    async def _whole(self, attempt: Awaitable[Answer]) -> Answer:
        try:
            answer = await attempt
            self._answered(answer.server)
            if self._one_model:
                await self._check_model(answer.server)
        except OtherModel as error:
            raise ServersUnavailable(error) from error
        except TesseraClientError:
            self._known.clear()  # any server may have started again, and with another model
            raise
        if answer.finish_reason == "deadline":
            raise DeadlineExceeded("the server had no time left for the whole answer", "give a longer --timeout")
        if answer.finish_reason == "cancelled":  # by somebody else, or by a server that stops
            raise Cancelled("the server cancelled the request")
        return answer

    async def _went_away(self, error: TesseraClientError, sent: int) -> bool:
        """Returns when a server is in order; whether the row's went away under it.

        Raises ServersUnavailable.
        """
        if error.server is not None:
            await self._in_order(error.server)
        outage = self._outages.get(error.server or "", NEVER)
        if sent > outage.ended:  # it was in order all the while
            return False
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.ensure_future(self._wait_for_server(error))
        await asyncio.shield(self._waiting)
        # One that was away already gets no row for a while, unless what it says is another error.
        return sent < outage.began or not isinstance(error, (Unavailable, ConnectionFailed))

    async def _in_order(self, server: str) -> bool:
        """By a look that began after this was called, which several rows share."""
        looking = self._looking.get(server)
        if looking is not None and not looking.done():
            await asyncio.shield(looking)
            looking = self._looking[server]
        if looking is None or looking.done():
            looking = self._looking[server] = asyncio.ensure_future(self._answers(server))
        return await asyncio.shield(looking)

    async def _answers(self, server: str) -> bool:
        try:
            await self._look(self._looks.only(server))
        except TesseraClientError:
            return False
        return True

    async def _wait_for_server(self, error: TesseraClientError) -> str:
        """The address of a server, when there is one in order. Raises ServersUnavailable."""
        started = time.monotonic()
        while True:
            try:
                return (await self._look(self._looks)).server
            except TesseraClientError as met:
                if time.monotonic() - started > self._patience:
                    raise ServersUnavailable(met) from error
            await asyncio.sleep(PAUSE_S)

    async def _look(self, client: AsyncClient) -> Answer:
        try:
            answer = await client.ask(None, "Hello", max_tokens=1)
        except TesseraClientError as error:
            if error.server is not None and not self._is_away(error.server):
                self._outages[error.server] = Outage(next(self._events))
            raise
        self._answered(answer.server)
        return answer

    def _is_away(self, server: str) -> bool:
        return self._outages.get(server, NEVER).ended == math.inf

    def _answered(self, server: str) -> None:
        if self._is_away(server):
            self._outages[server] = self._outages[server]._replace(ended=next(self._events))


def described(served: ServedModel) -> str:
    """For messages."""
    return f"{served.model_type}, checkpoint {served.checkpoint[:8]}"


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
