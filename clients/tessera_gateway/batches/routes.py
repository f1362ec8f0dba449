"""/v1/files and /v1/batches: what is asked for, from the database; an upload into the lines of a file, as it comes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from sqlite3 import Error as StorageError
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.responses import JSONResponse, StreamingResponse

from tessera_gateway.batches import jobs
from tessera_gateway.batches.database import is_full
from tessera_gateway.batches.service import BatchService
from tessera_gateway.connections import BODY, Body
from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.protocol import parse
from tessera_gateway.request import declared_size, pieces, read, require_json

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a form is said in the answer
MOST_LINES = 1_000_000
LONGEST_FIELD = 1000  # bytes of one that is no file
LONGEST_NAME = 200  # characters of a file's that are kept
DROP_S = 1.0  # that a refusal waits for the removal of what had come; longer where the disk is full


def _service(request: Request) -> BatchService:
    service: BatchService | None = request.app.state.batches
    if service is None:
        words = "there are no batches here: the gateway's option --batch-folder turns them on"
        raise ApiError(501, words, code="not_implemented")
    return service


router = APIRouter()
HERE = Depends(_service)


@router.post("/v1/files")
async def create_file(request: Request, service: BatchService = HERE) -> dict[str, Any]:
    """The new file. Raises ApiError for a form that is none, or has more or less than a file and its purpose, and
    sqlite3.OperationalError where there is no room for it, of which then nothing stays."""
    origin = request.headers.get("origin")
    # A form may be sent by any site's page without our leave; browsers say whose.
    allowed = request.app.state.settings.allowed_origins
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign and origin not in allowed and "*" not in allowed:
        raise ApiError(403, "another site's page may not upload here", code="foreign_origin")
    database = service.database
    body: Body | None = request.scope.get(BODY)
    key: int | None = None

    async def write() -> None:
        nonlocal key
        if key is None:
            key = await database.call(service.files.begin, form.filename, jobs.UPLOADED)
        lines, size = form.take()
        await database.call(service.files.append, key, lines)
        if body is not None:
            body.release(size)

    try:
        form = Form(request.headers.get("content-type", ""), request.app.state.settings.max_body_mib)
        await database.call(database.require_room, declared_size(request.headers))
        async for piece in pieces(request):
            form.feed(piece)
            if form.size >= jobs.SLICE_BYTES:
                await write()
        form.check_end()
        await write()
        return await database.call(service.files.finish, key)
    except BaseException as error:
        if key is not None:
            await asyncio.wait({service.later(service.files.drop, key)}, timeout=DROP_S)
        if isinstance(error, FormParserError):
            raise ApiError(400, f"the form cannot be read: {error}", code="invalid_form") from None
        raise


@router.get("/v1/files")
async def list_files(request: Request, service: BatchService = HERE) -> dict[str, Any]:
    query, limit = request.query_params, _limit(request, 10_000, 10_000)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order", "invalid_value")
    page = service.files.page, query.get("purpose"), query.get("after"), limit + 1, order == "desc"
    return _listed(await service.database.call(*page), limit)


@router.get("/v1/files/{name}")
async def show_file(name: str, service: BatchService = HERE) -> dict[str, Any]:
    return jobs.described_file(await service.database.call(service.files.find, name))


@router.delete("/v1/files/{name}")
async def delete_file(name: str, service: BatchService = HERE) -> dict[str, Any]:
    await service.database.call(service.files.delete, name)
    return {"id": name, "object": "file", "deleted": True}


@router.get("/v1/files/{name}/content")
async def file_content(name: str, service: BatchService = HERE) -> StreamingResponse:
    file = await service.database.call(service.files.find, name)
    length = {"Content-Length": str(file["bytes"])}  # so that a client knows what has been cut
    return StreamingResponse(_content(service, file["key"]), headers=length, media_type="application/octet-stream")


async def _content(service: BatchService, key: int) -> AsyncIterator[bytes]:
    last = 0
    while lines := await service.database.call(service.files.lines, key, last):
        last = lines[-1][0]
        yield b"".join(line for _, line in lines)


@router.post("/v1/batches")
async def create_batch(request: Request, service: BatchService = HERE) -> dict[str, Any]:
    require_json(request)
    return await service.database.call(service.jobs.create, parse(await read(request), jobs.NewBatch))


@router.get("/v1/batches")
async def list_batches(request: Request, service: BatchService = HERE) -> dict[str, Any]:
    limit = _limit(request, 20, 100)
    page = await service.database.call(service.jobs.page, request.query_params.get("after"), limit + 1)
    return _listed([service.explained(batch) for batch in page], limit)


@router.get("/v1/batches/{name}")
async def show_batch(name: str, service: BatchService = HERE) -> dict[str, Any]:
    return service.explained(jobs.described(await service.database.call(service.jobs.find, name)))


@router.post("/v1/batches/{name}/cancel")
async def cancel_batch(name: str, service: BatchService = HERE) -> dict[str, Any]:
    return await service.database.call(service.jobs.cancel, name)


def _limit(request: Request, usual: int, most: int) -> int:
    given = request.query_params.get("limit", str(usual))
    if not (given.isdecimal() and given.isascii() and len(given) < 10 and 0 < int(given) <= most):
        raise ApiError(400, f"limit must be from 1 to {most}", "limit", "invalid_value")
    return int(given)


def _listed(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of OpenAI's; ``found`` has one more where there are more."""
    page = found[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > limit}


async def answer_storage_error(_: Request, error: Exception) -> JSONResponse:
    """For a database that cannot be read or written: a full disk, say."""
    assert isinstance(error, StorageError)
    words = f"the batch folder cannot be used now: {error}"
    code = "storage_full" if is_full(error) else "storage_failed"
    return ApiError(503, words, code=code, headers={**RETRY_AFTER, "Connection": "close"}).response()


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
        self._headers: list[tuple[bytearray, bytearray]] = []  # of the field: names and values
        self._contents = {"purpose": bytearray(), "file": bytearray()}  # of the file: its last line, as far as it came
        self._begun: list[str] = []  # names of the fields
        self._lines: list[tuple[int, bytes]] = []
        self._count = 0
        calls: Any = {
            "on_part_begin": self._headers.clear,
            "on_header_begin": lambda: self._headers.append((bytearray(), bytearray())),
            "on_header_field": lambda data, start, end: self._headers[-1][0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._headers[-1][1].extend(data[start:end]),
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add,
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
        if self._parser.state != MultipartState.END:
            raise ApiError(400, "the form ends before its last boundary", code="invalid_form")
        if self._contents["purpose"] != jobs.UPLOADED.encode():
            raise ApiError(400, "purpose must be 'batch': files are kept for batches alone", "purpose", "invalid_value")
        if "file" not in self._begun:
            raise ApiError(400, "the form has no field 'file'", "file", "missing_required_parameter")
        if self._contents["file"]:
            self._end_line(b"")

    def _begin_content(self) -> None:
        named = {bytes(name).lower(): bytes(value) for name, value in self._headers}
        kind, options = parse_options_header(named.get(b"content-disposition"))
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
