"""Asks what batches have to ask: :class:`Runner`."""

import asyncio
import math
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial
from sqlite3 import Row
from typing import Any
from uuid import uuid4

from tessera_client import Answer, AsyncClient, InvalidRequest, TesseraClientError
from tessera_gateway import translation
from tessera_gateway.batches import service
from tessera_gateway.batches.database import FolderLock
from tessera_gateway.batches.jobs import Ending, Line, result
from tessera_gateway.batches.service import BatchService
from tessera_gateway.completions import sdk_call
from tessera_gateway.errors import ApiError, fault, from_wire, renamed
from tessera_gateway.metrics import Counters
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.protocol import ChatRequest, parse
from tessera_gateway.request import all_of
from tessera_gateway.settings import Settings
from tessera_gateway.tools import names
from tessera_jobs.asker import Asker, ServersUnavailable, end, for_each

PRIORITY = 10  # behind all that does not say; a request of its own higher number goes later yet
BUSY_S = 600.0  # that servers in order may refuse a request before it is an error
LONGEST_S = 3600.0  # that a request may take: all others go first
POLL_S = 0.25  # between two looks at what came and what was cancelled; any worker may have taken that
SWEEPS = 64  # slices of deleted files at each of them
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
        self, batches: BatchService, client: AsyncClient, fetcher: Fetcher, counters: Counters, settings: Settings
    ) -> None:
        self._service, self._jobs, self._do = batches, batches.jobs, batches.patiently
        self._client, self._fetcher, self._counters, self._settings = client, fetcher, counters, settings
        self._pool = uuid4().hex
        """Begins the names by which servers know batches, whose answers may be drafts of one another."""
        self._tasks: dict[int, tuple[Ending, asyncio.Task[None]]] = {}
        """By the batch's key: how it will end, and what brings it there."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It runs until this is left. Raises OSError where the folder can have no lock."""
        self._asker = Asker(self._client, patience=math.inf, busy=BUSY_S)
        self._slots = asyncio.Semaphore(self._settings.batch_concurrency)  # whose waiting batches take turns
        with closing(FolderLock(self._service.database.folder)) as lock:
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
                    await asyncio.sleep(service.AGAIN_S)
        finally:
            await end([task for _, task in self._tasks.values()])

    async def _look(self) -> None:
        """Begins what is new, and turns round what was cancelled or has expired. Raises what a batch met."""
        for key, (_, task) in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                task.result()
        for batch in await self._do(self._jobs.live):
            key, ending = batch["key"], _ending(batch["status"], batch["expires_at"])
            if key in self._tasks and self._tasks[key][0] != ending:
                await end([self._tasks.pop(key)[1]])
            if key not in self._tasks:
                self._tasks[key] = ending, asyncio.ensure_future(self._bring_to_end(key, ending))
        for _ in range(SWEEPS):
            if not await self._do(self._service.files.sweep):
                break

    async def _bring_to_end(self, key: int, ending: Ending) -> None:
        while await self._do(self._jobs.check, key):
            pass
        if ending == "completed":
            most = self._settings.batch_concurrency
            await for_each(self._requests(key), partial(self._write_answer, key), most, self._slots)
            if not await self._do(self._jobs.finalize, key):
                return
        else:
            while await self._do(self._jobs.give_up, key, *GIVEN_UP[ending]):
                pass
        while await self._do(self._jobs.end, key, ending):
            pass

    async def _requests(self, key: int) -> AsyncGenerator[Row, None]:
        after = 0
        while request := await self._do(self._jobs.next, key, after):
            yield request
            after = request["number"]

    async def _write_answer(self, key: int, request: Row) -> None:
        name = f"req_{uuid4().hex}"
        status, body = await self._answer(request["line"], name, f"{self._pool}.{key}")
        line = result(request["custom_id"], {"status_code": status, "request_id": name, "body": body}, None)
        await self._do(self._jobs.write, key, request["number"], status == 200, line)

    async def _answer(self, line: bytes, name: str, pool: str) -> tuple[int, dict[str, Any]]:
        """The HTTP status and the body that a chat completion's answer would have."""
        try:
            return 200, await self._completed(parse(parse(line, Line, "the line").body, ChatRequest), name, pool)
        except (ApiError, TesseraClientError) as error:
            refusal = from_wire(error)
        except ServersUnavailable as away:
            refusal = from_wire(away.error)
        except Exception:  # a line that brings the gateway's code down must not do so for ever
            refusal = fault(name)
            traceback.print_exc(file=sys.stderr)
        return refusal.status, refusal.body

    async def _completed(self, asked: ChatRequest, name: str, pool: str) -> dict[str, Any]:
        if asked.stream:
            raise ApiError(400, "stream is not possible in a batch", "stream", "unsupported_parameter")
        conversation, options = await sdk_call(asked, self._settings, self._fetcher)

        def answer(given: dict[str, Any]) -> Coroutine[Any, Any, Answer]:
            later = given | {"priority": max(PRIORITY, given.get("priority", PRIORITY)), "draft_pool": pool}
            return self._asker.ask(lambda on: on.named(name).chat(conversation, timeout=LONGEST_S, **later))

        try:
            answers = await all_of([answer(each) for each in options])
        except InvalidRequest as error:
            raise renamed(from_wire(error), names(asked)) from None
        whole = translation.Completion(asked).whole(answers)
        self._counters.used(whole["usage"])
        return whole


def _ending(status: str, expires_at: int) -> Ending:
    if status == "cancelling":
        return "cancelled"
    return "expired" if status != "finalizing" and expires_at <= time.time() else "completed"
