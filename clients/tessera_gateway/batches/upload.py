"""POST /v1/files: a form into the lines of a file, as it comes.

A body of multipart/form-data, read as it comes: :class:`FormReader`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from sqlite3 import Error as StorageError
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tessera_gateway.batches.database import Database
from tessera_gateway.batches.files import SLICE_BYTES, UPLOADED, Files
from tessera_gateway.body import pieces
from tessera_gateway.connections import BODY, Body
from tessera_gateway.errors import ApiError
from tessera_gateway.settings import Settings

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a form is said in the answer
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


class Field(NamedTuple):
    """Where a part of the form belongs; ``number`` counts them, for a name may stand twice."""

    number: int
    name: str
    filename: str


class FormReader:
    """Takes a body piece by piece. Raises ApiError for what is no form."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(415, "the body must be a form: multipart/form-data", code="unsupported_media_type")
        self._field = Field(0, "", "")
        self._new: list[tuple[Field, bytes]] = []
        self.finished = False
        """Whether the last boundary has come."""
        calls: Any = {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": lambda data, start, end: self._new.append((self._field, data[start:end])),
            "on_end": self._end,
        }
        with _said():
            self._parser = MultipartParser(options[b"boundary"], calls)

    def feed(self, data: bytes) -> list[tuple[Field, bytes]]:
        """What is new of which field; each field comes once with nothing, before its content."""
        with _said():
            self._parser.write(data)
        new, self._new = self._new, []
        return new

    def _begin(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header = bytearray(), bytearray()

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])

    def _begin_content(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise MultipartParseError("a field has no name")
        name, filename = (options.get(each, b"").decode("utf-8", "replace") for each in (b"name", b"filename"))
        self._field = Field(self._field.number + 1, name, filename)
        self._new.append((self._field, b""))

    def _end(self) -> None:
        self.finished = True


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise ApiError(400, f"the form cannot be read: {error}", code="invalid_form") from None
