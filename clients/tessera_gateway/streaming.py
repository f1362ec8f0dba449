"""An answer as server-sent events, each a ``chat.completion.chunk``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessera_client import AsyncStream, Delta, TesseraClientError
from tessera_gateway import translation
from tessera_gateway.body import unless_gone
from tessera_gateway.errors import ApiError, from_wire
from tessera_gateway.metrics import STATUS, USAGE

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """The answer of a stream whose first delta is there; closes the stream, whatever becomes of the client.

    An error after the first delta is an event of its own, as OpenAI's clients expect it, for the status is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, completion: translation.Completion, first: Delta, stream: AsyncStream, include_usage: bool
    ) -> None:
        self.status_code, self.background = 200, None
        # The second keeps a proxy of nginx's kind from gathering events up.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._completion, self._first, self._stream = completion, first, stream
        self._include_usage = include_usage
        self._usage: dict[str, int] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ApiError as error:  # the client went away: nobody is left to tell
            scope[STATUS] = error.status
        finally:
            scope[USAGE] = self._usage
            await self._stream.close()

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
        yield new({"role": "assistant", "content": ""})
        async for delta in self._deltas():
            if not delta.finish_reason:
                yield new({"content": delta.text}, entries=delta.logprobs)
                continue
            finish = translation.finish_reason(delta.finish_reason)
            if delta.text or delta.logprobs:
                yield new({"content": delta.text}, entries=delta.logprobs)
            self._usage = translation.usage(delta.usage)
            ending = {"usage": self._usage, "tessera": translation.extras(delta)}
            if self._include_usage:
                yield new({}, finish)
                yield self._completion.usage_chunk() | ending
            else:
                yield new({}, finish) | {"tessera": ending["tessera"]}

    async def _deltas(self) -> AsyncIterator[Delta]:
        yield self._first
        async for delta in self._stream:
            yield delta


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
