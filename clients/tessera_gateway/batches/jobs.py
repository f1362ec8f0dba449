"""Files, batches and their requests as the database has them: :class:`Files`, :class:`Jobs`. Their methods are for the
database's thread."""

import json
import time
import uuid
from collections.abc import Collection, Iterable
from sqlite3 import Row
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tessera_gateway.batches.database import Database
from tessera_gateway.errors import LONGEST, ApiError
from tessera_gateway.protocol import Part, parse

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
Ending = Literal["completed", "cancelled", "expired"]
COUNTS = ("total", "completed", "failed")
SAME_NAME = (
    *("id", "endpoint", "completion_window", "status", "input_file_id", "output_file_id", "error_file_id"),
    *("created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)


class NewBatch(Part):
    """What POST /v1/batches may hold."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions"]
    completion_window: Annotated[str, StringConstraints(pattern=r"^([1-9]\d{0,2})h$")]
    """OpenAI has ``24h`` alone."""
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None


class Line(Part):
    """What a line of a batch's input may hold."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: dict[str, Any]


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
        return described_file(self._database.all("UPDATE files SET state = 'whole' WHERE key = ? RETURNING *", key)[0])

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
        return [described_file(row) for row in self._database.all(query, *values, limit)]

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


class Jobs:
    def __init__(self, database: Database, files: Files) -> None:
        self._database, self._files = database, files

    def create(self, asked: NewBatch) -> dict[str, Any]:
        """A new batch. Raises ApiError where its file is none of the uploaded ones."""
        with self._database.transaction():
            file = self._files.find(asked.input_file_id)
            if file["purpose"] != UPLOADED:
                raise ApiError(400, "the file's purpose is not 'batch'", "input_file_id", "invalid_file")
            now, name = int(time.time()), f"batch_{uuid.uuid4().hex}"
            fields = {
                "id": name,
                "endpoint": asked.endpoint,
                "completion_window": asked.completion_window,
                "metadata": json.dumps(asked.metadata),
                "status": "validating",
                "input": file["key"],
                "input_file_id": file["id"],
                "output": self._files.begin(f"{name}_output.jsonl", RESULTS),
                "errors": self._files.begin(f"{name}_error.jsonl", RESULTS),
                "created_at": now,
                "expires_at": now + 3600 * int(asked.completion_window[:-1]),
            }
            places = ", ".join("?" * len(fields))
            self._database.change(f"INSERT INTO batches ({', '.join(fields)}) VALUES ({places})", *fields.values())
            return described(self.find(name))

    def find(self, name: str) -> Row:
        """Raises ApiError where no batch has this id."""
        row = self._database.one("SELECT * FROM batches WHERE id = ?", name)
        if row is None:
            raise ApiError(404, f"no batch {name!r:.80}", "batch_id", "batch_not_found")
        return row

    def page(self, after: str | None, limit: int) -> list[dict[str, Any]]:
        """At most ``limit`` batches, the newest first, that are older than the one with the id ``after``."""
        before = 1 << 62 if after is None else self.find(after)["key"]
        query = "SELECT * FROM batches WHERE key < ? ORDER BY key DESC LIMIT ?"
        return [described(row) for row in self._database.all(query, before, limit)]

    def cancel(self, name: str) -> dict[str, Any]:
        """The batch, which the runner then ends. Raises ApiError for one that is over."""
        self._become("cancelling", self.find(name)["key"], "validating", "in_progress")
        batch = described(self.find(name))
        if batch["status"] not in ("cancelling", "cancelled"):
            raise ApiError(409, f"the batch is {batch['status']}: it cannot be cancelled", "batch_id", "batch_over")
        return batch

    def live(self) -> list[Row]:
        """``key``, ``id``, ``status`` and ``expires_at`` of those that are not over, the oldest first."""
        return self._database.all(
            f"SELECT key, id, status, expires_at FROM batches WHERE status IN {LIVE} ORDER BY key"
        )

    def check(self, key: int) -> bool:
        """Gives the next lines a row in ``requests``, a slice of them, and one that is no request its result; whether
        there may be more. After the last line the batch is in progress."""
        with self._database.transaction():
            batch = self._batch(key)
            lines = self._files.lines(batch["input"], batch["checked"])
            for number, line in lines:
                if line.strip():
                    self._check(batch, number, line)
            if lines:
                self._database.change("UPDATE batches SET checked = ? WHERE key = ?", lines[-1][0], key)
                return True
            if batch["status"] == "validating" and not batch["total"]:
                reason = {"code": "empty_file", "message": "the file has no line", "line": None, "param": None}
                self._database.change("UPDATE batches SET failure = ? WHERE key = ?", json.dumps(reason), key)
                self._become("failed", key, "validating")
                self._finish_files(batch)
            self._become("in_progress", key, "validating")
            return False

    def _check(self, batch: Row, number: int, line: bytes) -> None:
        fault, custom_id = "", None
        try:
            custom_id = parse(line, Line, "the line").custom_id
        except ApiError as error:
            fault, custom_id = error.message, _readable_id(line)
        add = "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?)"
        if not self._database.change(add, batch["key"], number, custom_id, 0):
            query = "SELECT number FROM requests WHERE batch = ? AND custom_id = ?"
            first = self._database.all(query, batch["key"], custom_id)[0]
            fault = f"custom_id {custom_id!r:.80} stands on line {first['number']} already"
            # What has that id is the result of the first line alone.
            custom_id = None
            self._database.change(add, batch["key"], number, custom_id, 0)
        self._database.change("UPDATE batches SET total = total + 1 WHERE key = ?", batch["key"])
        if fault:
            reason = {"code": "invalid_line", "message": f"line {number}: {fault}"[:LONGEST]}
            self._write(batch, number, False, result(custom_id, None, reason))

    def next(self, key: int, after: int) -> Row | None:
        """``number``, ``custom_id`` and ``line`` of the first request without a result behind line ``after``."""
        query = (
            "SELECT r.number, r.custom_id, l.line FROM requests r JOIN batches b ON b.key = r.batch "
            "JOIN lines l ON l.file = b.input AND l.number = r.number "
            "WHERE r.batch = ? AND r.number > ? AND NOT r.over ORDER BY r.number LIMIT 1"
        )
        return self._database.one(query, key, after)

    def write(self, key: int, number: int, good: bool, line: bytes) -> None:
        """The result of a line, which has none afterwards if it had one before."""
        with self._database.transaction():
            batch = self._batch(key)
            self._write(batch, number, good, line)

    def _write(self, batch: Row, number: int, good: bool, line: bytes) -> None:
        over = "UPDATE requests SET over = 1 WHERE batch = ? AND number = ? AND NOT over"
        if self._database.change(over, batch["key"], number):
            self._files.append_within(batch["output" if good else "errors"], [(number, line)])
            count = "completed" if good else "failed"
            self._database.change(f"UPDATE batches SET {count} = {count} + 1 WHERE key = ?", batch["key"])

    def give_up(self, key: int, code: str, message: str) -> bool:
        """Gives requests without a result an error, a slice of them; whether there may be more."""
        with self._database.transaction():
            batch = self._batch(key)
            query = "SELECT number, custom_id FROM requests WHERE batch = ? AND NOT over ORDER BY number LIMIT ?"
            left = self._database.all(query, key, SLICE_LINES)
            for row in left:
                line = result(row["custom_id"], None, {"code": code, "message": message})
                self._write(batch, row["number"], False, line)
            return bool(left)

    def finalize(self, key: int) -> bool:
        """Whether a batch in progress is on its way to its end now: not one that is cancelled meanwhile."""
        return self._become("finalizing", key, "in_progress", "finalizing")

    def end(self, key: int, ending: Ending) -> bool:
        """Ends a batch whose lines all have a result, a slice of its work at a time; whether more is to do."""
        with self._database.transaction():
            some = "SELECT number FROM requests WHERE batch = ? LIMIT ?"
            forget = f"DELETE FROM requests WHERE batch = ? AND number IN ({some})"
            if self._database.change(forget, key, key, 64 * SLICE_LINES):
                return True
            self._finish_files(self._batch(key))
            self._become(ending, key, *LIVE)
            return False

    def _batch(self, key: int) -> Row:
        return self._database.all("SELECT * FROM batches WHERE key = ?", key)[0]

    def _become(self, status: str, key: int, *before: str) -> bool:
        """Gives a batch that is in one of the states ``before`` another, from now on; whether it was."""
        at, places = f"{status}_at", ", ".join("?" * len(before))
        change = f"UPDATE batches SET status = ?, {at} = ifnull({at}, ?) WHERE key = ? AND status IN ({places})"
        return bool(self._database.change(change, status, int(time.time()), key, *before))

    def _finish_files(self, batch: Row) -> None:
        """Results are files from now on; without any, there is no file."""
        for count, place, name in (("completed", "output", "output_file_id"), ("failed", "errors", "error_file_id")):
            if batch[count]:
                change = f"UPDATE batches SET {name} = ? WHERE key = ?"
                self._database.change(change, self._files.finish(batch[place])["id"], batch["key"])
            else:
                self._files.drop(batch[place])


def described_file(row: Row) -> dict[str, Any]:
    """A file as OpenAI's object."""
    same = {name: row[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return same | {"object": "file", "status": "processed", "status_details": None, "expires_at": None}


def described(row: Row) -> dict[str, Any]:
    """A batch as OpenAI's object."""
    failure = {"object": "list", "data": [json.loads(row["failure"])]} if row["failure"] else None
    return {name: row[name] for name in SAME_NAME} | {
        "object": "batch",
        "errors": failure,
        "metadata": json.loads(row["metadata"]),
        "request_counts": {name: row[name] for name in COUNTS},
    }


def result(custom_id: str | None, response: Any, error: dict[str, str] | None) -> bytes:
    """A line of an output or error file."""
    name = f"batch_req_{uuid.uuid4().hex}"
    return json.dumps({"id": name, "custom_id": custom_id, "response": response, "error": error}).encode() + b"\n"


def _readable_id(line: bytes) -> str | None:
    """The id of a line that is no request, where it has one."""
    try:
        found = json.loads(line)["custom_id"]
        return found if isinstance(found, str) and 0 < len(found.encode()) <= 512 else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
