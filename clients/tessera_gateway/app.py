"""The application: what is asked for, passed through what guards it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from threading import Thread
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tessera_client import AsyncClient, Retry, TesseraClientError
from tessera_gateway import completions, errors, page, responses, service, tracing
from tessera_gateway.batches import routes as batches
from tessera_gateway.batches.runner import Runner
from tessera_gateway.batches.service import BatchService
from tessera_gateway.connections import ConnectionLimits
from tessera_gateway.keys import RequireKey, Turns, read_keys
from tessera_gateway.metrics import Counters
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.request import RequestHeads
from tessera_gateway.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def create_app(
    settings: Settings, client: AsyncClient | None = None, provider: TracerProvider | None = None
) -> FastAPI:
    """The gateway to the servers of ``settings``; ``client`` in place of one for its URL is for tests.

    ``provider`` sends the spans of completions on, and is shut down with the application; None: there are none.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, ConnectionLimits]]:
        async with AsyncExitStack() as ends:
            if provider is not None:  # last of all: what ends before has spans too
                ends.push_async_callback(tracing.shut_down, provider)
            ends.push_async_callback(state.client.close)
            if state.batches is not None:
                ends.callback(state.batches.database.close)
                asking = client or AsyncClient(
                    settings.url, timeout=settings.timeout_s, retry=Retry(attempts=1), tracer=tracer
                )
                ends.push_async_callback(asking.close)
                runner = Runner(state.batches, asking, state.fetcher, state.counters, settings)
                await ends.enter_async_context(runner.running())
            yield {"door": state.door}

    app = FastAPI(openapi_url=None, lifespan=lifespan)
    state = app.state
    state.settings, state.began = settings, int(time.time())
    tracer = None if provider is None else provider.get_tracer("tessera")
    state.client = client or AsyncClient(settings.url, timeout=settings.timeout_s, tracer=tracer)
    state.metrics_urls, state.alarms = settings.metrics_urls, service.Alarms()
    state.fetcher = Fetcher(settings.fetch_from, settings.max_body_mib << 20)
    keys = read_keys(settings.keys) if settings.keys else []
    state.counters = Counters(settings.counters, settings.workers, [key.name for key in keys])
    state.turns = Turns(settings.places, settings.timeout_s)
    state.door = ConnectionLimits(state.counters, settings)
    state.batches = BatchService(settings.batch_folder, state.counters) if settings.batch_folder else None

    for room in (completions, responses, batches, service, page):
        app.include_router(room.router)

    app.add_exception_handler(batches.StorageError, batches.answer_storage_error)
    for kind in (errors.ApiError, TesseraClientError, HTTPException, Exception):
        app.add_exception_handler(kind, errors.answer_error)

    # The last one added is the first that a request meets.
    if keys:
        app.add_middleware(RequireKey, keys=keys, counters=state.counters)
    if settings.allowed_origins:  # before the keys: a browser asks for leave without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestHeads, settings=settings, counters=state.counters)
    if provider is not None:
        app.add_middleware(tracing.TraceRequests, provider=provider)
    return app


def worker_app(settings: Settings) -> FastAPI:
    """The application of a worker process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), name="parent-watch", daemon=True).start()
    return create_app(settings, provider=tracing.provider())


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    """A worker whose parent was killed would keep the port."""
    parent.join()
    os._exit(1)
