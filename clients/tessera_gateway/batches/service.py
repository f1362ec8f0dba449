"""The batches of a folder, as the routes and the runner use them: :class:`BatchService`."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from sqlite3 import Error as StorageError
from typing import Any, TypeVar

from tessera_gateway.batches.database import Database, is_full
from tessera_gateway.batches.jobs import LIVE, Files, Jobs
from tessera_gateway.metrics import WAITING, Counters

T = TypeVar("T")

AGAIN_S = 5.0  # after the database failed, or the disk was full


class BatchService:
    def __init__(self, folder: Path, counters: Counters) -> None:
        self.database, self._counters = Database(folder), counters
        self.files = Files(self.database)
        self.jobs = Jobs(self.database, self.files)
        self._waiting = 0  # for room on the disk: what is to be written
        self._tasks = set[asyncio.Future[Any]]()

    async def patiently(self, work: Callable[..., T], *arguments: object) -> T:
        """As the database does it, once the disk has room for it."""
        waits = False
        try:
            while True:
                try:
                    return await self.database.call(work, *arguments)
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

    def later(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Does it when the database can, whatever becomes of the caller."""
        task = asyncio.ensure_future(self._when_it_can(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _when_it_can(self, work: Callable[..., T], *arguments: object) -> T:
        while True:
            with suppress(StorageError):
                return await self.database.call(work, *arguments)
            await asyncio.sleep(AGAIN_S)

    def _waits(self, change: int) -> None:
        self._waiting += change
        self._counters.add(WAITING, change)
        if (change, self._waiting) == (1, 1):
            say(f"the disk of {self.database.folder} is full: batches wait until there is room")
        elif not self._waiting:
            say(f"there is room again on the disk of {self.database.folder}: batches go on")

    @property
    def trouble(self) -> str | None:
        """What is wrong with the folder, for people."""
        if self._counters.total(WAITING):
            return "the batch folder's disk is full: batches wait, and go on when there is room"
        return "the batch folder's disk is all but full: uploads are refused" if not self.database.has_room() else None

    def explained(self, batch: dict[str, Any]) -> dict[str, Any]:
        """With why it waits, where OpenAI's object says why one failed."""
        if not batch["errors"] and batch["status"] in LIVE and self._counters.total(WAITING):
            why = {"code": "storage_full", "message": self.trouble, "line": None, "param": None}
            return {**batch, "errors": {"object": "list", "data": [why]}}
        return batch


def say(words: str) -> None:
    print(f"tessera gateway: {words}", file=sys.stderr, flush=True)
