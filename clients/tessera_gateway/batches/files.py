"""Files as the database has them: :class:`Files`. Its methods are for the database's thread."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable
from sqlite3 import Row
from typing import Any

from tessera_gateway.batches.database import Database
from tessera_gateway.errors import ApiError

SLICE_BYTES = 1 << 20  # that are read or written at a time; more only where one line has more
SLICE_LINES = 256
STALE_S = 3600  # after which an upload that has not gone on never will: its gateway was killed
UPLOADED, RESULTS = "batch", "batch_output"
NEW = (
    "INSERT INTO files (id, filename, purpose, state, created_at, touched_at) VALUES (?, ?, ?, 'arriving', ?, ?) "
    "RETURNING key"
)
LIVE = ("validating", "in_progress", "finalizing", "cancelling")
"""What a batch that is not over may be; as Python writes it, it is SQL too."""


class Files:
    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, filename: str, purpose: str) -> int:
        """The key of a new file, which nobody sees before :meth:`finish`."""
        now, name = int(time.time()), f"file-{uuid.uuid4().hex}"
        return int(self._database.all(NEW, name, filename, purpose, now, now)[0]["key"])

    def append(self, key: int, lines: Collection[tuple[int, bytes]]) -> None:
        """Adds numbered lines of an upload. Raises sqlite3.IntegrityError for a number that is there,
        sqlite3.OperationalError where there is no room for them, ApiError for a file that is gone: :meth:`sweep` takes
        an upload that stood still."""
        self._database.require_room(2 * sum(len(line) for _, line in lines))  # in the log of changes, and in the file
        with self._database.transaction():
            self.append_within(key, lines)

    def append_within(self, key: int, lines: Iterable[tuple[int, bytes]]) -> None:
        """As :meth:`append`, in a transaction of the caller's."""
        size = 0
        for number, line in lines:
            self._database.change("INSERT INTO lines VALUES (?, ?, ?)", key, number, line)
            size += len(line)
        change = "UPDATE files SET bytes = bytes + ?, touched_at = ? WHERE key = ? AND state != 'gone'"
        if not self._database.change(change, size, int(time.time()), key):
            raise ApiError(408, f"the upload stood still for {STALE_S} s: send it again", code="slow_body")

    def finish(self, key: int) -> dict[str, Any]:
        """The file, which is whole now."""
        return described(self._database.all("UPDATE files SET state = 'whole' WHERE key = ? RETURNING *", key)[0])

    def drop(self, key: int) -> None:
        """It is gone for everybody at once, and its lines after :meth:`sweep`."""
        self._database.change("UPDATE files SET state = 'gone' WHERE key = ?", key)

    def find(self, name: str) -> Row:
        """Raises ApiError where no file has this id."""
        row = self._database.one("SELECT * FROM files WHERE id = ? AND state = 'whole'", name)
        if row is None:
            raise ApiError(404, f"no file {name!r:.80}", "file_id", "file_not_found")
        return row

    def delete(self, name: str) -> None:
        """Raises ApiError where no file has this id, or a batch still reads it."""
        with self._database.transaction():
            key = self.find(name)["key"]
            reader = self._database.one(f"SELECT id FROM batches WHERE input = ? AND status IN {LIVE}", key)
            if reader is not None:
                raise ApiError(409, f"{reader['id']} still reads this file: cancel it first", "file_id", "file_in_use")
            self.drop(key)

    def page(self, purpose: str | None, after: str | None, limit: int, newest_first: bool) -> list[dict[str, Any]]:
        """At most ``limit`` files that stand behind the one with the id ``after``."""
        query, values = "SELECT * FROM files WHERE state = 'whole'", list[object]()
        if purpose is not None:
            query, values = f"{query} AND purpose = ?", [purpose]
        if after is not None:
            query, values = f"{query} AND key {'<' if newest_first else '>'} ?", [*values, self.find(after)["key"]]
        query = f"{query} ORDER BY key {'DESC' if newest_first else 'ASC'} LIMIT ?"
        return [described(row) for row in self._database.all(query, *values, limit)]

    def lines(self, key: int, after: int) -> list[tuple[int, bytes]]:
        """The next lines behind number ``after``, a slice of them; none at the end."""
        found, size = list[tuple[int, bytes]](), 0
        query = "SELECT number, line FROM lines WHERE file = ? AND number > ? ORDER BY number LIMIT ?"
        for row in self._database.each(query, key, after, SLICE_LINES):
            found.append((row["number"], row["line"]))
            size += len(row["line"])
            if size >= SLICE_BYTES:
                break
        return found

    def sweep(self) -> bool:
        """Removes a slice of what belongs to files that are gone; whether there was any."""
        change = "UPDATE files SET state = 'gone' WHERE state = 'arriving' AND purpose = ? AND touched_at < ?"
        self._database.change(change, UPLOADED, int(time.time()) - STALE_S)
        row = self._database.one("SELECT key FROM files WHERE state = 'gone' LIMIT 1")
        if row is None:
            return False
        # From the end, where the newest file's pages are likely those that the database's file gives back at once.
        some = "SELECT number, length(line) AS size FROM lines WHERE file = ? ORDER BY number DESC LIMIT ?"
        size, first = 0, None
        for line in self._database.each(some, row["key"], SLICE_LINES):
            first, size = line["number"], size + line["size"]
            if size >= SLICE_BYTES:  # SQLite may write all that it removes, over its former content
                break
        if first is None:
            self._database.change("DELETE FROM files WHERE key = ?", row["key"])
            self._database.all("PRAGMA wal_checkpoint")  # which shortens the database's file
        else:
            self._database.change("DELETE FROM lines WHERE file = ? AND number >= ?", row["key"], first)
        return True


def described(row: Row) -> dict[str, Any]:
    """A file as OpenAI's object."""
    same = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return same | {"object": "file", "status": "processed", "status_details": None, "expires_at": None}
