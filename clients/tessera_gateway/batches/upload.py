"""POST /v1/files: a form into the lines of a file, as it comes.

A body of multipart/form-data, read as it comes: :class:`FormReader`.
"""

from __future__ import annotations

import asyncio
import email
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.message import Message
from sqlite3 import Error as StorageError
from typing import Any, NamedTuple

from starlette.requests import Request

from tessera_gateway.batches.database import Database
from tessera_gateway.batches.files import SLICE_BYTES, UPLOADED, Files
from tessera_gateway.body import pieces
from tessera_gateway.connections import BODY, Body
from tessera_gateway.errors import ApiError
from tessera_gateway.settings import Settings

MOST_LINES = 1_000_000
LONGEST_FIELD = 1000  # bytes of one that is no file
AGAIN_S = 5.0  # after the database failed
DROPPING = set[asyncio.Task[None]]()
"""What removes uploads that could not be removed at once."""
LONGEST_NAME = 200  # characters of a file's that are kept


async def upload(request: Request, database: Database, files: Files, settings: Settings) -> dict[str, Any]:
    """The new file. Raises ApiError for a form that is none, or has more or less than a file and its purpose, and
    sqlite3.OperationalError where there is no room for it, of which then nothing stays."""
    form = FormReader(request.headers.get("content-type", ""))
    fields: dict[str, bytes] = {}
    names: dict[str, int] = {}
    lines: _Lines | None = None
    declared = request.headers.get("content-length", "")
    await database.call(database.require_room, int(declared) if declared.isdecimal() else 0)
    try:
        async for piece in pieces(request, settings.timeout_s):
            for field, content in form.feed(piece):
                _check_name(field, names)
                if field.name != "file":
                    fields[field.name] = fields.get(field.name, b"") + content
                    if len(fields[field.name]) > LONGEST_FIELD:
                        raise ApiError(400, f"{field.name} is too long", field.name, "invalid_value")
                elif lines is None:
                    key = await database.call(files.begin, field.filename[:LONGEST_NAME] or "file", UPLOADED)
                    lines = _Lines(database, files, key, settings.max_body_mib << 20, request.scope.get(BODY))
                else:
                    await lines.take(content)
        if not form.finished:
            raise ApiError(400, "the form ends before its last boundary", code="invalid_form")
        if fields.get("purpose") != UPLOADED.encode():
            raise ApiError(400, "purpose must be 'batch': files are kept for batches alone", "purpose", "invalid_value")
        if lines is None:
            raise ApiError(400, "the form has no field 'file'", "file", "missing_required_parameter")
        return await lines.finish()
    except BaseException:
        if lines is not None:
            try:
                await database.call(files.drop, lines.key)
            except StorageError:  # it goes when it can
                task = asyncio.ensure_future(_drop(database, files, lines.key))
                DROPPING.add(task)
                task.add_done_callback(DROPPING.discard)
        raise


async def _drop(database: Database, files: Files, key: int) -> None:
    while True:
        await asyncio.sleep(AGAIN_S)
        with suppress(StorageError):
            return await database.call(files.drop, key)


def _check_name(field: Field, names: dict[str, int]) -> None:
    if field.name not in ("file", "purpose"):
        raise ApiError(400, f"{field.name:.80} is not known", field.name, "unknown_parameter")
    if names.setdefault(field.name, field.number) != field.number:
        raise ApiError(400, f"the form has {field.name} twice", field.name, "invalid_form")


class _Lines:
    """A file's content on its way into lines."""

    def __init__(self, database: Database, files: Files, key: int, longest: int, body: Body | None) -> None:
        self.key, self._body = key, body
        self._database, self._files, self._longest = database, files, longest
        self._rest = bytearray()
        self._ready: list[tuple[int, bytes]] = []
        self._count = self._size = 0

    async def take(self, content: bytes) -> None:
        """Raises ApiError for a line that is too long, and for one too many."""
        *whole, rest = content.split(b"\n")
        for end in whole:
            self._add(end + b"\n")
        self._rest += rest
        self._check_length(len(self._rest))
        if self._size >= SLICE_BYTES:
            await self._write()

    async def finish(self) -> dict[str, Any]:
        if self._rest:
            self._add(b"")
        await self._write()
        return await self._database.call(self._files.finish, self.key)

    def _add(self, end: bytes) -> None:
        line = bytes(self._rest) + end
        self._rest.clear()
        self._check_length(len(line))
        if self._count == MOST_LINES:
            raise ApiError(
                413, f"the file has more than {MOST_LINES:,} lines: send it as several", code="too_many_lines"
            )
        self._count += 1
        self._size += len(line)
        self._ready.append((self._count, line))

    def _check_length(self, length: int) -> None:
        if length > self._longest:
            words = f"line {self._count + 1} is larger than {self._longest >> 20} MiB (--max-body-mib)"
            raise ApiError(413, words, code="line_too_long")

    async def _write(self) -> None:
        ready, size = self._ready, self._size
        self._ready, self._size = [], 0
        await self._database.call(self._files.append, self.key, ready)
        if self._body is not None:
            self._body.release(size)


MOST_HEADERS = 8192  # bytes of a field's


class Field(NamedTuple):
    """Where a part of the form belongs; ``number`` counts them, for a name may stand twice."""

    number: int
    name: str
    filename: str


class FormReader:
    """Takes a body piece by piece. Raises ApiError for what is no form."""

    def __init__(self, content_type: str) -> None:
        header = Message()
        header["Content-Type"] = content_type
        boundary = _text(header.get_boundary)
        if header.get_content_type() != "multipart/form-data" or not boundary:
            raise ApiError(415, "the body must be a form: multipart/form-data", code="unsupported_media_type")
        self._line = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # with which the first boundary is like the others
        self._field: Field | None = None
        self._fields = 0
        self._at_boundary = False
        self.finished = False
        """Whether the last boundary has come."""

    def feed(self, data: bytes) -> Iterator[tuple[Field, bytes]]:
        """What is new of which field; each field comes once with nothing, before its content."""
        self._buffer += data
        while not self.finished:
            if self._at_boundary:
                if len(self._buffer) < 2:
                    return
                if self._buffer.startswith(b"--"):
                    self.finished = True
                elif not self._begin():
                    return
                else:
                    assert self._field is not None
                    yield self._field, b""
            else:
                end = self._buffer.find(self._line)
                # Of what is not known yet to be content, as much stays as may be the beginning of a boundary.
                content = bytes(self._buffer[: end if end >= 0 else max(0, len(self._buffer) - len(self._line) + 1)])
                del self._buffer[: len(content)]
                if self._field is not None and content:
                    yield self._field, content
                if end < 0:
                    return
                del self._buffer[: len(self._line)]
                self._at_boundary = True
        self._buffer.clear()

    def _begin(self) -> bool:
        """Reads a field's headers; whether they are there."""
        end = self._buffer.find(b"\r\n\r\n")
        if end > MOST_HEADERS or (end < 0 and len(self._buffer) > MOST_HEADERS):
            raise _broken("a field's headers are too long")
        if end < 0:
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise _broken("a boundary does not end its line")
        headers = email.message_from_string(self._buffer[2 : end + 4].decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _broken("a field has no name")
        del self._buffer[: end + 4]
        self._fields += 1
        self._field = Field(self._fields, name, _text(headers.get_filename))
        self._at_boundary = False
        return True


def _text(read: Callable[[], str | None]) -> str:
    """A parameter of a header, whose sender may name any of Python's codecs for it (RFC 2231)."""
    try:
        return (read() or "").encode("utf-8", "replace").decode()
    except ValueError:
        raise _broken("a header does not follow the character set that it names") from None


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")
