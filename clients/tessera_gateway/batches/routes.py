"""/v1/files and /v1/batches: what is asked for, from the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from sqlite3 import Error as StorageError
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, StreamingResponse

from tessera_gateway.batches import files, jobs
from tessera_gateway.batches.database import is_full
from tessera_gateway.batches.service import BatchService
from tessera_gateway.batches.upload import upload
from tessera_gateway.body import read, require_json
from tessera_gateway.errors import RETRY_AFTER, ApiError
from tessera_gateway.protocol import parse


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
    origin = request.headers.get("origin")
    # A form may be sent by any site's page without our leave; browsers say whose.
    allowed = request.app.state.settings.allowed_origins
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign and origin not in allowed and "*" not in allowed:
        raise ApiError(403, "another site's page may not upload here", code="foreign_origin")
    return await upload(request, service, request.app.state.settings)


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
    return files.described(await service.database.call(service.files.find, name))


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
