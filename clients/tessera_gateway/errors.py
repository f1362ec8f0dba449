"""What goes wrong, as OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}`` and an HTTP status.

The servers' refusals in the API's words: their names for what was asked become the fields that a request has.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from tessera_wire import errors as wire

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "request_cancelled"}
"""By status, where it is not that of its hundred: 4xx the request's fault, 5xx ours."""
STATUSES = (
    (wire.DeadlineExceeded, 504, "deadline_exceeded"),
    (wire.ConnectionFailed, 503, "server_unavailable"),
    (wire.Unavailable, 503, "server_unavailable"),
    (wire.Cancelled, 499, "cancelled"),
)
"""Of the SDK's errors, that are no fault of the request."""
FULL = re.compile(r"queue is full|too many|in flight|maximum queue size", re.IGNORECASE)
RETRY_AFTER = {"Retry-After": "1"}
REQUEST_ID = "tessera.request_id"
"""Key of a request's scope: what the log and the answer's ``x-request-id`` call it."""
LONGEST = 400  # characters of a message: what a client sent may be named in it, but not sent back whole


class ApiError(Exception):
    """An answer that is an error.

    ``param`` is the path of the field at fault (``messages[0].content[1].image_url.url``), ``code`` a word that
    programs can go by.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message[:LONGEST], code
        self.param = param and param[:LONGEST]
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with the fields at fault called as ``names`` has it, by the beginnings of their paths."""
    for old, new in names.items():
        if error.param is not None and re.match(rf"{re.escape(old)}(?![a-z_])", error.param):
            param = new + error.param[len(old) :]
            words = error.message.replace(error.param, param, 1)
            return ApiError(error.status, words, param, error.code, error.headers)
    return error


def from_wire(error: ApiError | wire.TesseraClientError) -> ApiError:
    """The answer for an error of the SDK's; one of the gateway's own is the answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, wire.InvalidRequest):
        return _in_api_words(str(error))
    words = _without_internals(str(error))
    if isinstance(error, wire.Unavailable) and FULL.search(error.message):
        return ApiError(429, words, code="overloaded", headers=RETRY_AFTER)
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return ApiError(status, words, code=code, headers=RETRY_AFTER if status == 503 else None)
    return ApiError(500, words, code="server_error")


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """For what was refused here or by the servers, a path or a method that is not served, and a fault of the gateway's
    own."""
    if isinstance(error, HTTPException):
        words = {404: f"nothing is served at {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
        message = words.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, code="unknown_url", headers=error.headers).response()
    if isinstance(error, (ApiError, wire.TesseraClientError)):
        return from_wire(error).response()
    return fault(str(request.scope.get(REQUEST_ID))).response()


def fault(request_id: str) -> ApiError:
    """Of the gateway's own, which its log shows."""
    print(f"tessera gateway: request {request_id} failed:", file=sys.stderr, flush=True)
    words, headers = "the gateway failed at this request; its log says why", {"x-request-id": request_id}
    return ApiError(500, words, code="gateway_error", headers=headers)


FIELDS = {
    "json_schema": "response_format.json_schema.schema",
    "json_object": "response_format",
    "regex": "tessera.regex",
    "choices": "tessera.choices",
    "tile_policy": "tessera.tile_policy",
    "logprobs": "top_logprobs",
    "no_repeat_ngram_size": "vllm_xargs.no_repeat_ngram_size",
    "draft": "vllm_xargs.draft",
    "min_pixels": "mm_processor_kwargs.min_pixels",
    "max_pixels": "mm_processor_kwargs.max_pixels",
}
"""Of the sampling parameters those that the API has elsewhere; the others are called the same."""
PARAMETER = re.compile(
    r"(?:sampling_parameters: |(?=m(?:in|ax)_pixels ))(?!unknown key)([a-z_]+)((?:\.[^\s:]+|\[\d+\])*)"
)
SHAPE = re.compile(r"(json_schema|json_object|regex|choices)()(?= needs? )")
MESSAGE = re.compile(r"messages(?:\[\d+\](?:\.\w+|\[\d+\])*)?(?=[ :.])")
PICTURE = re.compile(r"image \d+ ")
TOO_LONG = re.compile(
    r"exceed the context|leaves no room for an answer|tokens than the context|can never fit the cache"
)
INTERNAL = (
    (re.compile(r"^(?:preprocess|vision_encoder|language_model|vlm\w*) failed on this request"), "the server failed"),
    (re.compile(r"^language_model failed: "), ""),
    (re.compile(r"^sampling_parameters:? "), ""),
    (re.compile(r"\binput 'text_input'|\btext_input\b"), "messages"),
    (re.compile(r"\binput '(\w+)'"), r"\1"),
)


def _in_api_words(words: str) -> ApiError:
    """What a server says of a request, for a reader who knows the API alone; with the field at fault if it tells."""
    if TOO_LONG.search(words):
        return ApiError(400, words, "messages", "context_length_exceeded")
    param = None
    if named := PARAMETER.match(words) or SHAPE.match(words):
        param = FIELDS.get(named[1], named[1]) + named[2]
        words = f"{param}{words[named.end() :]}"
    else:
        words = _without_internals(words)
        if words.startswith("tile policy"):
            param = FIELDS["tile_policy"]
        elif (place := MESSAGE.match(words)) or PICTURE.match(words):
            param = place[0] if place else "messages"
    return ApiError(400, words, param, "invalid_request")


def _without_internals(words: str) -> str:
    """The words without names of stages and tensors, which no client of the API knows."""
    for pattern, instead in INTERNAL:
        words = pattern.sub(instead, words)
    return words
