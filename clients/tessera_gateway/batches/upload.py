"""POST /v1/files: a form into the lines of a file, as it comes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tessera_gateway.batches.files import SLICE_BYTES, UPLOADED
from tessera_gateway.batches.service import BatchService
from tessera_gateway.body import declared_size, pieces
from tessera_gateway.connections import BODY, Body
from tessera_gateway.errors import ApiError
from tessera_gateway.settings import Settings

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a form is said in the answer
MOST_LINES = 1_000_000
LONGEST_FIELD = 1000  # bytes of one that is no file
LONGEST_NAME = 200  # characters of a file's that are kept
DROP_S = 1.0  # that a refusal waits for the removal of what had come; longer where the disk is full


async def upload(request: Request, service: BatchService, settings: Settings) -> dict[str, Any]:
    """The new file. Raises ApiError for a form that is none, or has more or less than a file and its purpose, and
    sqlite3.OperationalError where there is no room for it, of which then nothing stays."""
    database, files = service.database, service.files
    body: Body | None = request.scope.get(BODY)
    key: int | None = None

    async def write() -> None:
        nonlocal key
        if key is None:
            key = await database.call(files.begin, form.filename, UPLOADED)
        lines, size = form.take()
        await database.call(files.append, key, lines)
        if body is not None:
            body.release(size)

    try:
        form = Form(request.headers.get("content-type", ""), settings.max_body_mib)
        await database.call(database.require_room, declared_size(request.headers))
        async for piece in pieces(request):
            form.feed(piece)
            if form.size >= SLICE_BYTES:
                await write()
        form.check_end()
        await write()
        return await database.call(files.finish, key)
    except BaseException as error:
        if key is not None:
            await asyncio.wait({service.later(files.drop, key)}, timeout=DROP_S)
        if isinstance(error, FormParserError):
            raise ApiError(400, f"the form cannot be read: {error}", code="invalid_form") from None
        raise


class Form:
    """The form of an upload, piece by piece. Raises ApiError, or FormParserError, for what is none.

    Args:
        longest: MiB that a line of the file may have.
    """

    def __init__(self, content_type: str, longest: int) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(415, "the body must be a form: multipart/form-data", code="unsupported_media_type")
        self.filename = ""
        self.size = 0
        """Bytes of the lines that :meth:`take` would give."""
        self._longest = longest
        self._contents = {"purpose": bytearray(), "file": bytearray()}  # of the file: its last line, as far as it came
        self._begun: list[str] = []  # names of the fields
        self._lines: list[tuple[int, bytes]] = []
        self._count = 0
        self._ended = False  # the last boundary has come
        calls: Any = {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add,
            "on_end": self._end,
        }
        self._parser = MultipartParser(options[b"boundary"], calls)

    def feed(self, piece: bytes) -> None:
        self._parser.write(piece)

    def take(self) -> tuple[list[tuple[int, bytes]], int]:
        """The numbered lines that have come since, and their bytes."""
        taken = self._lines, self.size
        self._lines, self.size = [], 0
        return taken

    def check_end(self) -> None:
        """To be called at the end of the body, whose last line may lack its end."""
        if not self._ended:
            raise ApiError(400, "the form ends before its last boundary", code="invalid_form")
        if self._contents["purpose"] != UPLOADED.encode():
            raise ApiError(400, "purpose must be 'batch': files are kept for batches alone", "purpose", "invalid_value")
        if "file" not in self._begun:
            raise ApiError(400, "the form has no field 'file'", "file", "missing_required_parameter")
        if self._contents["file"]:
            self._end_line(b"")

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
        if name not in self._contents:
            raise ApiError(400, f"{name:.80} is not known", name, "unknown_parameter")
        if name in self._begun:
            raise ApiError(400, f"the form has {name} twice", name, "invalid_form")
        self._begun.append(name)
        if name == "file":
            self.filename = filename[:LONGEST_NAME] or "file"

    def _add(self, data: bytes, start: int, end: int) -> None:
        name, content = self._begun[-1], data[start:end]
        if name == "file":
            *whole, content = content.split(b"\n")
            for line in whole:
                self._end_line(line + b"\n")
        self._contents[name] += content
        if name == "file":
            self._check_length(len(self._contents[name]))
        elif len(self._contents[name]) > LONGEST_FIELD:
            raise ApiError(400, f"{name} is too long", name, "invalid_value")

    def _end_line(self, end: bytes) -> None:
        line = bytes(self._contents["file"]) + end
        self._contents["file"].clear()
        self._check_length(len(line))
        if self._count == MOST_LINES:
            words = f"the file has more than {MOST_LINES:,} lines: send it as several"
            raise ApiError(413, words, code="too_many_lines")
        self._count += 1
        self.size += len(line)
        self._lines.append((self._count, line))

    def _check_length(self, length: int) -> None:
        if length > self._longest << 20:
            words = f"line {self._count + 1} is larger than {self._longest} MiB (--max-body-mib)"
            raise ApiError(413, words, code="line_too_long")

    def _end(self) -> None:
        self._ended = True
