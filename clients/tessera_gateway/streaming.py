"""An answer as server-sent events, each a ``chat.completion.chunk``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessera_client import AsyncStream, Delta, TesseraClientError
from tessera_gateway import translation
from tessera_gateway.body import STOPPING, unless_gone
from tessera_gateway.errors import ApiError, from_wire
from tessera_gateway.metrics import STATUS, USAGE

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The answers of streams whose first deltas are there; closes the streams, whatever becomes of the client.

    An error after the first delta is an event of its own, as OpenAI's clients expect it, for the status is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        completion: translation.Completion,
        firsts: Sequence[Delta],
        streams: Sequence[AsyncStream],
        include_usage: bool,
    ) -> None:
        self.status_code, self.background = 200, None
        # The second keeps a proxy of nginx's kind from gathering events up.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._completion, self._firsts, self._streams = completion, firsts, streams
        self._include_usage = include_usage
        self._usage: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ApiError as error:
            scope[STATUS] = error.status
            if error is STOPPING:  # else the client went away: nobody is left to tell
                await send({"type": "http.response.body", "body": event(error.body) + DONE, "more_body": False})
        finally:
            scope[USAGE] = self._usage
            await asyncio.gather(*(stream.close() for stream in self._streams))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks():
                await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        except (TesseraClientError, ApiError) as error:
            told = error if isinstance(error, ApiError) else from_wire(error)
            scope[STATUS] = told.status
            await send({"type": "http.response.body", "body": event(told.body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        new = self._completion.chunk
        readers = [self._completion.reader() for _ in self._streams]
        for index in range(len(readers)):
            yield new(index, {"role": "assistant", "content": ""})
        endings: dict[int, Delta] = {}
        async for index, delta in merged(self._firsts, self._streams):
            reader = readers[index]
            reason = translation.finish_reason(delta.finish_reason) if delta.finish_reason else None
            changes = reader.read(delta.text) + (reader.end(reason == "stop") if reason else [])
            for change in changes or [{"content": ""}] * bool(delta.logprobs):
                yield new(index, change, entries=delta.logprobs)
            if reason is None:
                continue
            endings[index] = delta
            ended = new(index, {}, self._completion.reason(reason, reader))
            if len(endings) < len(readers):
                yield ended
                continue
            self._usage = translation.usage([each.usage for each in endings.values()])
            own = {"tessera": translation.extras(endings[0])}
            if self._include_usage:
                yield ended
                yield self._completion.usage_chunk() | {"usage": self._usage} | own
            else:
                yield ended | own


async def merged(firsts: Sequence[Delta], streams: Sequence[AsyncStream]) -> AsyncIterator[tuple[int, Delta]]:
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


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
