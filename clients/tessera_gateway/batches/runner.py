"""Asks what batches have to ask: :class:`Runner`."""

from __future__ import annotations

import asyncio
import math
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial
from sqlite3 import Error as StorageError
from typing import Any, TypeVar
from uuid import uuid4

from tessera_client import Answer, AsyncClient, InvalidRequest, TesseraClientError
from tessera_gateway import completions, translation
from tessera_gateway.batches.database import Database, FolderLock, is_full
from tessera_gateway.batches.files import Files
from tessera_gateway.batches.jobs import Ending, Jobs, Line, Request, result
from tessera_gateway.body import all_of
from tessera_gateway.errors import ApiError, from_wire, renamed
from tessera_gateway.metrics import WAITING, Counters
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.protocol import ChatRequest, parse, parse_object
from tessera_gateway.settings import Settings
from tessera_gateway.tools import names
from tessera_jobs.asker import Asker, Away, end, for_each

T = TypeVar("T")

PRIORITY = 10  # behind all that does not say; a request of its own higher number goes later yet
BUSY_S = 600.0  # that servers in order may refuse a request before it is an error
LONGEST_S = 3600.0  # that a request may take: all others go first
POLL_S = 0.25  # between two looks at what came and what was cancelled; any worker may have taken that
SWEEPS = 64  # slices of deleted files at each of them
AGAIN_S = 5.0  # after the database failed, or the disk was full
GIVEN_UP = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the completion window ended before this request was answered"),
}


class Runner:
    """Runs the batches of a folder, where no other process does: a lock on the folder says which one may.

    Args:
        client: one that leaves trying again to an :class:`Asker`.
    """

    def __init__(
        self, database: Database, client: AsyncClient, fetcher: Fetcher, counters: Counters, settings: Settings
    ) -> None:
        self._database, self._client = database, client
        self._files = Files(database)
        self._jobs = Jobs(database, self._files)
        self._fetcher, self._counters, self._settings = fetcher, counters, settings
        self._waiting = 0  # for room on the disk: what is to be written
        self._tasks: dict[int, tuple[Ending, asyncio.Task[None]]] = {}
        """By the batch's key: how it will end, and what brings it there."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It runs until this is left. Raises OSError where the folder can have no lock."""
        self._asker = Asker(self._client, patience=math.inf, busy=BUSY_S)
        self._slots = asyncio.Semaphore(self._settings.batch_concurrency)  # whose waiting batches take turns
        with closing(FolderLock(self._database.folder)) as lock:
            task = asyncio.ensure_future(self._run(lock))
            try:
                yield
            finally:
                await end([task])

    async def _run(self, lock: FolderLock) -> None:
        try:
            while True:
                try:
                    if lock.take():
                        await self._look()
                    await asyncio.sleep(POLL_S)
                except Exception:  # what is in the database goes on when it can
                    traceback.print_exc(file=sys.stderr)
                    await asyncio.sleep(AGAIN_S)
        finally:
            await end([task for _, task in self._tasks.values()])

    async def _look(self) -> None:
        """Begins what is new, and turns round what was cancelled or has expired. Raises what a batch met."""
        for key, (_, task) in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                task.result()
        for batch in await self._call(self._jobs.live):
            key, ending = batch["key"], _ending(batch["status"], batch["expires_at"])
            if key in self._tasks and self._tasks[key][0] != ending:
                await end([self._tasks.pop(key)[1]])
            if key not in self._tasks:
                work = self._ask_all(key) if ending == "completed" else self._give_up(key, ending)
                self._tasks[key] = ending, asyncio.ensure_future(work)
        for _ in range(SWEEPS):
            if not await self._call(self._files.sweep):
                break

    async def _ask_all(self, key: int) -> None:
        while await self._call(self._jobs.check, key):
            pass
        most = self._settings.batch_concurrency
        await for_each(self._requests(key), partial(self._write_answer, key), most, self._slots)
        if await self._call(self._jobs.finalize, key):
            await self._finish(key, "completed")

    async def _requests(self, key: int) -> AsyncGenerator[Request, None]:
        after = 0
        while request := await self._call(self._jobs.next, key, after):
            yield request
            after = request.number

    async def _give_up(self, key: int, ending: Ending) -> None:
        while await self._call(self._jobs.check, key):
            pass
        while await self._call(self._jobs.give_up, key, *GIVEN_UP[ending]):
            pass
        await self._finish(key, ending)

    async def _finish(self, key: int, ending: Ending) -> None:
        while await self._call(self._jobs.end, key, ending):
            pass

    async def _write_answer(self, key: int, request: Request) -> None:
        name = f"req_{uuid4().hex}"
        status, body = await self._answer(request.line, name)
        response = {"status_code": status, "request_id": name, "body": body}
        line = result(request.custom_id, response, None)
        await self._call(self._jobs.write, key, request.number, status == 200, line)

    async def _answer(self, line: bytes, name: str) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the body that a chat completion's answer would have."""
        try:
            asked = parse_object(parse(line, Line, "the line").body)
            return 200, await self._completed(asked, name)
        except ApiError as error:
            refusal = error
        except TesseraClientError as error:
            refusal = from_wire(error)
        except Away as away:
            refusal = from_wire(away.error)
        except Exception:  # a line that brings the gateway's code down must not do so for ever
            _say(f"request {name} failed:")
            traceback.print_exc(file=sys.stderr)
            refusal = ApiError(500, "the gateway failed at this request; its log says why", code="gateway_error")
        return refusal.status, refusal.body

    async def _completed(self, asked: ChatRequest, name: str) -> dict[str, Any]:
        if asked.stream:
            raise ApiError(400, "stream is not possible in a batch", "stream", "unsupported_parameter")
        completions.check_model(asked, self._settings)
        asked = completions.with_floor(asked, self._settings.priority_floor)
        conversation = translation.messages(asked, await self._fetcher.fetch(translation.urls(asked)))
        options = translation.sampling(asked, self._settings.max_tokens)
        completion = translation.Completion(asked)

        def answer(each: dict[str, Any]) -> Coroutine[Any, Any, Answer]:
            priority = max(PRIORITY, each.get("priority", PRIORITY))
            given = each | {"priority": priority}
            return self._asker.ask(lambda on: on.named(name).chat(conversation, timeout=LONGEST_S, **given))

        try:
            whole = completion.whole(await all_of([answer(each) for each in options]))
        except InvalidRequest as error:
            raise renamed(from_wire(error), names(asked)) from None
        self._counters.used(whole["usage"])
        return whole

    async def _call(self, work: Callable[..., T], *arguments: object) -> T:
        """As the database does it, once the disk has room for it."""
        waits = False
        try:
            while True:
                try:
                    return await self._database.call(work, *arguments)
                except StorageError as error:
                    if not is_full(error):
                        raise
                if not waits:
                    self._waits(1)
                waits = True
                await asyncio.sleep(AGAIN_S)
        finally:
            if waits:
                self._waits(-1)

    def _waits(self, change: int) -> None:
        self._waiting += change
        self._counters.add(WAITING, change)
        if (change, self._waiting) == (1, 1):
            _say(f"the disk of {self._database.folder} is full: batches wait until there is room")
        elif not self._waiting:
            _say(f"there is room again on the disk of {self._database.folder}: batches go on")


def _say(words: str) -> None:
    print(f"tessera gateway: {words}", file=sys.stderr, flush=True)


def _ending(status: str, expires_at: int) -> Ending:
    if status == "cancelling":
        return "cancelled"
    return "expired" if status != "finalizing" and expires_at <= time.time() else "completed"
