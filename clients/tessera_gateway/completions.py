"""POST /v1/chat/completions: a body, the request in it, the SDK's call, the answer, whole or as events.

Answers as server-sent events; those of chat completions are each a ``chat.completion.chunk``.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tessera_client import AsyncClient, AsyncStream, Delta, InvalidRequest, TesseraClientError
from tessera_gateway import protocol, translation
from tessera_gateway.errors import REQUEST_ID, ApiError, from_wire, renamed
from tessera_gateway.keys import ANYBODY, KEY
from tessera_gateway.metrics import COMPLETIONS, MODEL, STATUS, USAGE
from tessera_gateway.pictures_from import Fetcher
from tessera_gateway.request import STOPPING, all_of, read, require_json, unless_gone
from tessera_gateway.settings import Settings
from tessera_gateway.tools import names

T = TypeVar("T", bound=protocol.Part)

SdkCall = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""A conversation, its messages as the SDK takes them, and the options of each of the answers."""

router = APIRouter()


@router.post(COMPLETIONS)
async def complete(request: Request) -> Response:
    asked = await request_in(request, protocol.ChatRequest)
    return await answered(request, asked, translation.Completion(asked))


async def request_in(request: Request, kind: type[T]) -> T:
    """What the body holds. Raises ApiError."""
    require_json(request)
    return protocol.parse(await read(request), kind)


async def answered(request: Request, asked: protocol.ChatRequest, form: translation.Completion) -> Response:
    """Asks the servers, and tells what they answer."""
    client: AsyncClient = request.app.state.client.named(request.scope[REQUEST_ID])
    try:
        conversation, options = await unless_gone(request.receive, _in_turn(request, asked))
        if len(options) > 1:
            client = client.together()
        if asked.stream:
            return await _events(request, form, [client.chat_stream(conversation, **each) for each in options])
        answers = await unless_gone(request.receive, all_of([client.chat(conversation, **each) for each in options]))
    except InvalidRequest as error:
        raise renamed(from_wire(error), names(asked)) from None
    whole = form.whole(answers)
    request.scope[USAGE] = form.used
    return JSONResponse(whole)


async def sdk_call(asked: protocol.ChatRequest, settings: Settings, fetcher: Fetcher) -> SdkCall:
    """A request as the SDK's, at its own priority or at the best there is. Raises ApiError for a model that there is
    not, a better priority, and pictures that cannot be fetched."""
    if asked.model not in settings.model_names:
        there_is = ", ".join(settings.model_names)
        raise ApiError(404, f"no model {asked.model!r:.80}; there is {there_is}", "model", "model_not_found")
    floor = settings.priority_floor
    if floor is not None:
        if asked.priority is not None and asked.priority < floor:
            words = f"priority is {asked.priority}; here it may be {floor} or more"
            raise ApiError(400, words, "priority", "invalid_value")
        asked = asked.model_copy(update={"priority": max(asked.priority or 0, floor)})
    urls = translation.urls(asked)
    conversation = translation.messages(asked, await fetcher.fetch(urls) if urls else {})
    return conversation, translation.sampling(asked, settings.max_tokens)


async def _in_turn(request: Request, asked: protocol.ChatRequest) -> SdkCall:
    """The call, when its turn has come and at the priority which that gives it."""
    state = request.app.state
    request.scope[MODEL] = asked.model[:80]
    conversation, options = await sdk_call(asked, state.settings, state.fetcher)
    priority = options[0].get("priority", 0)
    turn = await state.turns.take(request.scope, priority, len(options))
    own = {"priority": turn} if turn != priority else {}
    pool = request.scope.get(KEY, ANYBODY).pool
    own |= {"draft_pool": pool} if pool else {}
    return conversation, [each | own for each in options]


async def _events(request: Request, form: translation.Completion, streams: list[AsyncStream]) -> Response:
    """The streams from their first deltas on: an error before these has a status of its own."""
    try:
        firsts = await unless_gone(request.receive, all_of([anext(stream) for stream in streams]))
    except BaseException:
        await asyncio.gather(*(stream.close() for stream in streams))
        raise
    return EventStream(form, firsts, streams)


class EventStream(Response):
    """The answers of streams whose first deltas are there; closes the streams, whatever becomes of the client.

    An error after the first delta is an event of its own, as OpenAI's clients expect it, for the status is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, form: translation.Completion, firsts: Sequence[Delta], streams: Sequence[AsyncStream]) -> None:
        self.status_code, self.background = 200, None
        # The second keeps a proxy of nginx's kind from gathering events up.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._form, self._firsts, self._streams = form, firsts, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ApiError as error:
            scope[STATUS] = error.status
            if error is STOPPING:  # else the client went away
                await send(_body(self._form.failed(error) + self._form.ending, more=False))
        finally:
            scope[USAGE] = self._form.used
            await asyncio.gather(*(stream.close() for stream in self._streams))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(merged(self._firsts, self._streams)) as coming:
                async for event in self._form.events(coming):
                    await send(_body(event))
        except (TesseraClientError, ApiError) as error:
            refusal = from_wire(error)
            scope[STATUS] = refusal.status
            await send(_body(self._form.failed(refusal)))
        await send(_body(self._form.ending, more=False))


async def merged(firsts: Sequence[Delta], streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Each stream's number and delta, as they come."""
    for numbered in enumerate(firsts):
        yield numbered
    if len(streams) == 1:  # without a task for each delta
        async for delta in streams[0]:
            yield 0, delta
        return
    coming = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: coming[each]):
                index = coming.pop(task)
                if (found := task.result()) is not None:
                    coming[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, found
    finally:
        for task in coming:
            task.cancel()
        if coming:
            await asyncio.wait(coming)


def _body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
