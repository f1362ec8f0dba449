"""Batches and their requests as the database has them: :class:`Jobs`. Its methods are for the database's thread."""

from __future__ import annotations

import json
import re
import time
import uuid
from sqlite3 import Row
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from tessera_gateway.batches.database import Database
from tessera_gateway.batches.files import LIVE, RESULTS, SLICE_LINES, UPLOADED, Files
from tessera_gateway.errors import LONGEST, ApiError
from tessera_gateway.protocol import Part, parse

ENDPOINT = "/v1/chat/completions"
HOURS = re.compile(r"([1-9]\d{0,2})h")
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
    completion_window: Annotated[str, StringConstraints(pattern=f"^{HOURS.pattern}$")]
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
            hours = HOURS.fullmatch(asked.completion_window)
            assert hours is not None
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
                "expires_at": now + 3600 * int(hours[1]),
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
