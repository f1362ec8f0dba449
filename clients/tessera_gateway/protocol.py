"""What a request to ``/v1/chat/completions`` may hold. What is not here is refused by name, never passed over.

The names are OpenAI's, then those of vLLM's extensions, then ours in one object, ``tessera``. Types are checked here,
ranges by the server, which is the one that knows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from tessera_gateway.errors import ApiError

NOT_SERVED = (
    *("audio", "function_call", "functions", "modalities", "moderation"),
    *("prompt_cache_retention", "reasoning_effort", "verbosity", "web_search_options"),
    *("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs.grammar"),
    *("background", "conversation", "include", "max_tool_calls", "prompt", "reasoning"),  # of /v1/responses
    *("structured_outputs.structural_tag", "structured_outputs.whitespace_pattern"),
)
"""Fields that OpenAI or vLLM has and this server has no meaning for."""


MOST_FIELDS = 100
MOST_METADATA = 16  # OpenAI's
MOST_TOOLS = 128  # OpenAI's
MOST_ANSWERS = 8
MOST_VALUES = 100_000  # pictures and texts are few values, however large; a worker stands still while it reads many


class Part(BaseModel):
    """A part of a request. Strict: the text "5" is no number, and a field that is not known is an error.

    Null is the same as absent, in every field: clients send an answer back with all that theirs may hold.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MOST_FIELDS:
            raise ValueError(f"an object of more than {MOST_FIELDS} fields")
        return {name: value for name, value in fields.items() if value is not None}


class Text(Part):
    type: Literal["text"]
    text: str


class ImageUrl(Part):
    url: str
    """A ``data:`` URL; or ``http(s)://`` at a host that the gateway may fetch from."""
    detail: Literal["auto", "low", "high"] | None = None
    """``low``: one tile. The others mean what the tile policy says."""


class Picture(Part):
    type: Literal["image_url"]
    image_url: ImageUrl


def by_type(*types: str) -> Discriminator:
    """Which branch of a union an object is, by its ``type``; the branches' tags are set in brackets (see _path)."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if isinstance(kind, str) else None

    expected = f"must be an object whose type is {' or '.join(types)}"
    return Discriminator(tag, custom_error_type="unknown_type", custom_error_message=expected)


V = TypeVar("V")
Several = Annotated[list[V], Field(fail_fast=True)]
"""Refused at the first fault: what pydantic notes of each of a million would not fit into memory."""
STRING, OTHER = Tag("<string>"), Tag("<other>")
STRING_OR_OTHER = Discriminator(lambda value: "<string>" if isinstance(value, str) else "<other>")
StringOr = Annotated[Annotated[str, STRING] | Annotated[V, OTHER], STRING_OR_OTHER]
ContentPart = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Picture, Tag("<image_url>")], by_type("text", "image_url")
]
Content = StringOr[Several[ContentPart]]


class CalledFunction(Part):
    name: str
    arguments: str


class ToolCall(Part):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    """Without effect: no prompt shows it."""
    tool_calls: Several[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_calls(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls stand in messages of the assistant")
        if (self.tool_call_id is None) is (self.role == "tool"):
            raise ValueError("a message of role tool, and no other, has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has no content")
        return self


class Function(Part):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """A call always follows the parameters to the letter."""

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given and given.get("type") != "object":
            raise ValueError('the schema of a function\'s parameters must have "type": "object"')
        return given


class Tool(Part):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], STRING] | Annotated[NamedTool, OTHER], STRING_OR_OTHER
]


class StreamOptions(Part):
    include_usage: bool = False


class PlainText(Part):
    type: Literal["text"]


class JsonObject(Part):
    type: Literal["json_object"]


class NamedSchema(Part):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """An answer always follows the schema to the letter."""


class JsonSchema(Part):
    type: Literal["json_schema"]
    json_schema: NamedSchema


TextOrObject = StringOr[dict[str, Any]]
GuidedChoice = Annotated[Several[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class StructuredOutputs(Part):
    """``structured_outputs``, vLLM's later name for what its ``guided_*`` were."""

    json_: TextOrObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: GuidedChoice | None = None
    json_object: bool | None = None


class VllmArguments(Part):
    """``vllm_xargs``: what vLLM hands to its plug-ins, of which two are known here."""

    no_repeat_ngram_size: int | None = None
    draft: str | None = None
    debug: Literal[False] | None = None  # mineru-vl-utils sends it


class Prediction(Part):
    """What much of the answer is known to be, OpenAI's name for a draft."""

    type: Literal["content"]
    content: StringOr[Several[Text]]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ProcessorArguments(Part):
    """``mm_processor_kwargs``: what vLLM hands to the checkpoint's image processor."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class Tessera(Part):
    """What only this server has."""

    choices: Several[str] | None = None
    """The answer is the likeliest of these labels (docs/clients.md)."""
    regex: str | None = None
    """The answer matches this regular expression."""
    tile_policy: TextOrObject | None = None
    """How finely pictures are cut (docs/tile_policies.md)."""


Format = Annotated[
    Annotated[PlainText, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[V, Tag("<json_schema>")],
    by_type("text", "json_object", "json_schema"),
]
"""What an answer is to be, by how a schema is given."""


def _metadata(given: dict[str, Any]) -> dict[str, Any]:
    if len(given) > MOST_METADATA or not all(isinstance(value, str) for value in given.values()):
        raise ValueError(f"must be an object of at most {MOST_METADATA} strings")
    return given


class Harmless(Part):
    """What is without effect on an answer: it has one call at most, and is stored nowhere (to ask for it is 404)."""

    metadata: Annotated[dict[str, Any], AfterValidator(_metadata)] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    user: str | None = None


class ChatRequest(Harmless):
    model: str
    messages: Several[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: StringOr[Several[str]] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Format[JsonSchema] | None = None
    tools: Annotated[Several[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    prediction: Prediction | None = None

    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: Several[int] | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    vllm_xargs: VllmArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: TextOrObject | None = None
    guided_regex: str | None = None
    guided_choice: GuidedChoice | None = None

    tessera: Tessera | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer, by either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_tokens != self.limit:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.prediction is not None and self.vllm_xargs is not None and self.vllm_xargs.draft is not None:
            raise ValueError("prediction and vllm_xargs.draft are the same; send one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (named is not None and named not in names) or (self.tool_choice == "required" and not names):
            raise ValueError(f"tool_choice: there is no tool {named or ''!r:.70}; tools must hold it")
        if names and self.tool_choice != "none" and self.logprobs:
            raise ValueError('logprobs of calls are not possible; send no logprobs, or tool_choice: "none"')
        return self


T = TypeVar("T", bound=Part)


def parse(body: bytes | dict[str, Any], kind: type[T], what: str = "the body") -> T:
    """The request in a body, or in what has been read from one. Raises ApiError that names the first field at fault and
    says how many more are."""
    if isinstance(body, bytes) and sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        words = f"{what} has more than {MOST_VALUES:,} values (or commas and brackets in its texts)"
        raise ApiError(413, words, code="body_too_large")
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    raise _refusal(faults[0], len(faults) - 1, what)


def _refusal(fault: ErrorDetails, more: int, what: str) -> ApiError:
    if fault["type"] == "json_invalid":
        return ApiError(400, f"{what} is not JSON: {fault['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    path = _path(fault["loc"])
    others = f" (and {more} more fault{'s' if more > 1 else ''})" if more else ""
    if fault["type"] == "extra_forbidden":
        what = "is not supported by this server" if path in NOT_SERVED else "is not known"
        code = "unsupported_parameter" if path in NOT_SERVED else "unknown_parameter"
        return ApiError(400, f"{path} {what}{others}", path, code)
    code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
    words = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}: {words}{others}" if path else f"{words}{others}", path or None, code)


def _path(places: tuple[int | str, ...]) -> str:
    """``messages[0].content[1].text`` for pydantic's location, less the tags of unions' branches."""
    named = (place for place in places if isinstance(place, int) or not place.startswith("<"))
    return "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in named).removeprefix(".")
