"""What is said of the service itself: its models, its health, its counters."""

from __future__ import annotations

import re

import httpx
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tessera_gateway.errors import ApiError
from tessera_gateway.metrics import Counters
from tessera_gateway.settings import Settings
from tessera_gateway.status import joined, metrics_pages, named
from tessera_wire.version import VERSION

PROMETHEUS = "text/plain; version=0.0.4"
PAGE_SECONDS = 5.0
MODEL_SECONDS = 1.0
CONTEXT = re.compile(r"^tessera_max_model_len(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, object]:
    settings: Settings = request.app.state.settings
    length = await _max_model_len(request)
    return {"object": "list", "data": [_model(request, name, length) for name in settings.model_names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, object]:
    if name not in request.app.state.settings.model_names:
        raise ApiError(404, f"no model {name!r:.80}", "model", "model_not_found")
    return _model(request, name, await _max_model_len(request))


def _model(request: Request, name: str, length: int | None) -> dict[str, object]:
    began = request.app.state.began
    return {"id": name, "object": "model", "created": began, "owned_by": "tessera", "max_model_len": length}


async def _max_model_len(request: Request) -> int | None:
    """Of the servers' contexts the shortest, by their metrics pages; None while one does not tell."""
    pages = await metrics_pages(request.app.state.metrics_urls, MODEL_SECONDS)
    lengths = [CONTEXT.search(page) if isinstance(page, str) else None for page in pages.values()]
    return min((int(float(length[1])) for length in lengths if length), default=None) if all(lengths) else None


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/ping")
@router.post("/ping")
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 when every server takes requests, else 503; and what is wrong with the batch folder, which questions of
    people do not need."""
    ready = await request.app.state.client.ready()
    trouble = request.app.state.batches and request.app.state.batches.trouble
    return JSONResponse({"ready": ready, **({"batches": trouble} if trouble else {})}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The gateway's own counters, of all its workers."""
    counters: Counters = request.app.state.counters
    return PlainTextResponse(counters.page(), media_type=PROMETHEUS)


@router.get("/metrics/servers")
async def servers_metrics(request: Request) -> Response:
    """The servers' own pages as one, whose samples say of which server they are; one server's is passed on as it is."""
    pages = await metrics_pages(request.app.state.metrics_urls, PAGE_SECONDS)
    for url, page in pages.items():
        if isinstance(page, httpx.HTTPError):
            words = f"no metrics from {url}: {page or type(page).__name__}"
            raise ApiError(503, words, code="server_unavailable")
    found = {named(url): str(page) for url, page in pages.items()}
    return PlainTextResponse(joined(found) if len(found) > 1 else "".join(found.values()), media_type=PROMETHEUS)
