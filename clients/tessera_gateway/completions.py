"""POST /v1/chat/completions: a body, the request in it, the SDK's call, the answer, whole or as events."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tessera_client import AsyncClient, AsyncStream
from tessera_gateway import protocol, translation
from tessera_gateway.body import all_of, read, require_json, unless_gone
from tessera_gateway.errors import ApiError
from tessera_gateway.metrics import COMPLETIONS, MODEL, USAGE
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.settings import Settings
from tessera_gateway.streaming import EventStream

router = APIRouter()


@router.post(COMPLETIONS)
async def complete(request: Request) -> Response:
    settings: Settings = request.app.state.settings
    client: AsyncClient = request.app.state.client
    require_json(request)
    asked = protocol.parse(await read(request, settings.timeout_s), protocol.ChatRequest)
    check_model(asked, settings)
    asked = with_floor(asked, settings.priority_floor)
    request.scope[MODEL] = asked.model
    conversation = translation.messages(asked, await _fetched(request, asked))
    options = translation.sampling(asked, settings.max_tokens)
    completion = translation.Completion(asked)
    if len(options) > 1:
        client = client.together()
    if asked.stream:
        return await _events(request, completion, asked, [client.chat_stream(conversation, **each) for each in options])
    answers = await unless_gone(request.receive, all_of([client.chat(conversation, **each) for each in options]))
    whole = completion.whole(answers)
    request.scope[USAGE] = whole["usage"]
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


async def _events(
    request: Request, completion: translation.Completion, asked: protocol.ChatRequest, streams: list[AsyncStream]
) -> Response:
    """The streams from their first deltas on: an error before these has a status of its own."""
    try:
        firsts = await unless_gone(request.receive, all_of([anext(stream) for stream in streams]))
    except BaseException:
        await asyncio.gather(*(stream.close() for stream in streams))
        raise
    include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    return EventStream(completion, firsts, streams, include_usage)
