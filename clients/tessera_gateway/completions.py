"""POST /v1/chat/completions: a body, the request in it, the SDK's call, the answer, whole or as events."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tessera_client import AsyncClient, AsyncStream, InvalidRequest
from tessera_gateway import protocol, translation
from tessera_gateway.body import all_of, read, require_json, unless_gone
from tessera_gateway.errors import REQUEST_ID, ApiError, from_wire, renamed
from tessera_gateway.metrics import COMPLETIONS, MODEL, USAGE
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.settings import Settings
from tessera_gateway.shapes import names
from tessera_gateway.streaming import ChatTold, EventStream, Told
from tessera_gateway.turns import Turns

T = TypeVar("T", bound=protocol.Part)

router = APIRouter()


@router.post(COMPLETIONS)
async def complete(request: Request) -> Response:
    asked = await request_in(request, protocol.ChatRequest)
    return await answered(request, asked, ChatTold(asked))


async def request_in(request: Request, kind: type[T]) -> T:
    """What the body holds. Raises ApiError."""
    require_json(request)
    settings: Settings = request.app.state.settings
    return protocol.parse(await read(request, settings.timeout_s), kind)


async def answered(request: Request, asked: protocol.ChatRequest, told: Told) -> Response:
    """Asks the servers, and tells what they answer."""
    settings: Settings = request.app.state.settings
    client: AsyncClient = request.app.state.client.named(request.scope[REQUEST_ID])
    check_model(asked, settings)
    asked = with_floor(asked, settings.priority_floor)
    request.scope[MODEL] = asked.model
    conversation = translation.messages(asked, await _fetched(request, asked))
    options = translation.sampling(asked, settings.max_tokens)
    if len(options) > 1:
        client = client.together()
    turns: Turns = request.app.state.turns
    priority = asked.priority or 0
    turn = await unless_gone(request.receive, turns.take(request.scope, priority, len(options)))
    if turn != priority:
        options = [each | {"priority": turn} for each in options]
    try:
        if asked.stream:
            return await _events(request, told, [client.chat_stream(conversation, **each) for each in options])
        answers = await unless_gone(request.receive, all_of([client.chat(conversation, **each) for each in options]))
    except InvalidRequest as error:
        raise renamed(from_wire(error), names(asked)) from None
    whole = told.whole(answers)
    request.scope[USAGE] = told.used
    return JSONResponse(whole)


def check_model(asked: protocol.ChatRequest, settings: Settings) -> None:
    """Raises ApiError for a model that there is not."""
    if asked.model not in settings.model_names:
        words = f"no model {asked.model!r:.80}; there is {', '.join(settings.model_names)}"
        raise ApiError(404, words, "model", "model_not_found")


def with_floor(asked: protocol.ChatRequest, floor: int | None) -> protocol.ChatRequest:
    """The request at its own priority, or at the best there is. Raises ApiError where it asks for a better one."""
    if floor is None:
        return asked
    if asked.priority is not None and asked.priority < floor:
        words = f"priority is {asked.priority}; here it may be {floor} or more"
        raise ApiError(400, words, "priority", "invalid_value")
    return asked.model_copy(update={"priority": max(asked.priority or 0, floor)})


async def _fetched(request: Request, asked: protocol.ChatRequest) -> dict[str, bytes]:
    fetcher: Fetcher = request.app.state.fetcher
    urls = translation.urls(asked)
    return await unless_gone(request.receive, fetcher.fetch(urls)) if urls else {}


async def _events(request: Request, told: Told, streams: list[AsyncStream]) -> Response:
    """The streams from their first deltas on: an error before these has a status of its own."""
    try:
        firsts = await unless_gone(request.receive, all_of([anext(stream) for stream in streams]))
    except BaseException:
        await asyncio.gather(*(stream.close() for stream in streams))
        raise
    return EventStream(told, firsts, streams)
