"""POST /v1/responses: OpenAI's later way to ask, as a chat completion in other words."""

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Tag, field_validator
from starlette.responses import Response

from tessera_client import Answer, Delta
from tessera_gateway import protocol, translation
from tessera_gateway.completions import answered, request_in
from tessera_gateway.errors import ApiError, renamed
from tessera_gateway.metrics import RESPONSES

NOTHING_STORED = "nothing is stored here: send the whole conversation as input"
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Of a chat completion's fields, those that are called otherwise here."""
router = APIRouter()


class InputText(protocol.Part):
    type: Literal["input_text"]
    text: str


class InputImage(protocol.Part):
    type: Literal["input_image"]
    image_url: str
    """As in a chat completion."""
    detail: Literal["auto", "low", "high"] | None = None


class OutputText(protocol.Part):
    """Of an earlier answer, as it was told."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


ItemPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[OutputText, Tag("<output_text>")],
    protocol.by_type("input_text", "input_image", "output_text"),
]


class Item(protocol.Part):
    """A turn of the conversation; also an earlier answer's ``output``, as it came."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: protocol.StringOr[protocol.Several[ItemPart]]
    id: str | None = None
    status: str | None = None


Input = protocol.StringOr[Annotated[protocol.Several[Item], Field(min_length=1)]]


class Schema(protocol.NamedSchema):
    type: Literal["json_schema"]


class TextConfig(protocol.Part):
    format: protocol.Format[Schema] | None = None


class StreamOptions(protocol.Part):
    include_obfuscation: bool | None = None  # there is none


class ResponsesRequest(protocol.Harmless):
    model: str
    input: Input
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    """Chat completions have functions."""
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: str | None = None
    tessera: protocol.Tessera | None = None

    @field_validator("previous_response_id")
    @classmethod
    def _check_previous(cls, given: str | None) -> str | None:
        if given is not None:
            raise ValueError(NOTHING_STORED)
        return given

    def chat(self) -> protocol.ChatRequest:
        """The same as a chat completion. Raises ApiError."""
        given = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns: list[dict[str, Any]] = [{"role": item.role, "content": _content(item)} for item in given]
        if self.instructions is not None:
            parts = [{"type": "text", "text": self.instructions}]
            if turns[0]["role"] in ("system", "developer"):  # a template has room for one
                first = turns.pop(0)["content"]
                parts += [{"type": "text", "text": "\n\n"}]
                parts += [{"type": "text", "text": first}] if isinstance(first, str) else first
            turns.insert(0, {"role": "system", "content": parts})
        same = self.model_dump(include={"model", "stream", "temperature", "top_p", "tessera"})
        own = {"max_completion_tokens": self.max_output_tokens, "response_format": self._format()}
        return protocol.parse({**same, **own, "messages": turns}, protocol.ChatRequest)

    def in_its_words(self, error: ApiError, chat: protocol.ChatRequest) -> ApiError:
        """An error of the chat completion with the names that fields have here."""
        if isinstance(self.input, str):
            return renamed(error, {"messages[0]": "input", "messages[1]": "input", **_NAMES})
        added = len(chat.messages) - len(self.input)
        turns = {f"messages[{place + added}]": f"input[{place}]" for place in range(len(self.input))}
        return renamed(error, turns | _NAMES)

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if isinstance(form, Schema):
            return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}
        return {"type": form.type} if form else None


def _content(item: Item) -> str | list[dict[str, Any]]:
    if isinstance(item.content, str):
        return item.content
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in item.content
    ]


@router.post(RESPONSES)
async def respond(request: Request) -> Response:
    asked = await request_in(request, ResponsesRequest)
    chat = asked.chat()
    try:
        return await answered(request, chat, ResponsesFormat(asked, chat))
    except ApiError as error:
        raise asked.in_its_words(error, chat) from None


@router.api_route(RESPONSES + "/{path:path}", methods=["GET", "POST", "DELETE"])
async def stored(path: str) -> Response:
    raise ApiError(404, f"there is no response {path!r:.80}: {NOTHING_STORED}", code="response_not_found")


class ResponsesFormat(translation.Completion):
    """As OpenAI's responses: one message, of one part, in the documented order of events."""

    ending = b""

    def __init__(self, asked: ResponsesRequest, chat: protocol.ChatRequest) -> None:
        super().__init__(chat)
        self._told = asked
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._number = 0
        self._text = ""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._text = answer.text
        return self._ended(answer)

    async def events(self, coming: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        at: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))
        begun = self._item("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._event("response.content_part.added", **at, part=self._part())
        async for _, delta in coming:
            if delta.finish_reason:
                translation.finish_reason(delta.finish_reason)
            if delta.text:
                self._text += delta.text
                yield self._event("response.output_text.delta", **at, delta=delta.text, logprobs=[])
            if delta.finish_reason:
                ended = self._ended(delta)
                yield self._event("response.output_text.done", **at, text=self._text, logprobs=[])
                yield self._event("response.content_part.done", **at, part=self._part())
                yield self._event("response.output_item.done", output_index=0, item=ended["output"][0])
                yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> bytes:
        told = error.body["error"]
        about = {name: told[name] for name in ("code", "message", "param")}
        fault = {"code": "server_error", "message": told["message"]}
        response = self._response("failed") | {"error": fault}
        return self._event("error", **about) + self._event("response.failed", response=response)

    def _ended(self, answer: Answer | Delta) -> dict[str, Any]:
        """The response when all is known. Raises ApiError for an answer that was not finished."""
        cut = translation.finish_reason(answer.finish_reason) == "length"
        status = "incomplete" if cut else "completed"
        self.used = translation.usage([answer.usage])
        return self._response(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(status)],
            "usage": self.used and _usage(self.used),
            "tessera": translation.extras(answer),
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return translation.event({"type": kind, "sequence_number": number, **content}, kind)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> dict[str, Any]:
        about = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return about | {"content": [self._part()]}

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._told
        form = asked.text.format if asked.text else None
        told = protocol.PlainText(type="text") if form is None else form
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": [],
            "parallel_tool_calls": True if asked.parallel_tool_calls is None else asked.parallel_tool_calls,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature or 0.0,
            "text": {"format": told.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _usage(used: dict[str, Any]) -> dict[str, Any]:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # nothing is charged for that
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }
