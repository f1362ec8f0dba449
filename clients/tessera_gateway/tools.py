"""Functions that an answer may call: what the model reads of them, what it must write, and how that becomes calls.

Few models that see pictures were taught to call functions, and few of their templates know of any. So the functions
stand in the system message, and a schema leaves the model only calls that fit them to write, and words where the client
lets it choose (``tool_choice: "auto"``): then these are JSON too.

What an answer must be, in whichever way a request says so: one option of the SDK's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tessera_gateway.errors import FIELDS, ApiError
from tessera_gateway.protocol import ChatRequest, Function, JsonObject, JsonSchema, NamedTool, ToolCall

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA = ("const", "enum", "default", "examples")  # of a schema: what is in them is no schema
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # what is in them has names of the client's choice
_WORDS = '{"answer": "'
_CALL = re.compile(r'\{"name": "([^"]*)", "arguments": ')
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')


@dataclass(frozen=True)
class Calls:
    """What an answer may call, if anything. ``named``: the client chose the one; ``words``: it may also be no call."""

    functions: tuple[Function, ...] = ()
    named: bool = False
    words: bool = False

    @property
    def alone(self) -> Function | None:
        """The function whose arguments are the whole answer."""
        return self.functions[0] if len(self.functions) == 1 and not self.words else None

    @cached_property
    def schema(self) -> dict[str, Any]:
        if self.alone is not None:
            return _parameters(self.alone)
        forms = [_object(answer={"type": "string"})] if self.words else []
        forms += [
            _object(name={"const": each.name}, arguments={"$ref": f"#/$defs/{each.name}"}) for each in self.functions
        ]
        return {
            "anyOf": forms,
            "$defs": {each.name: _parameters(each, f"#/$defs/{each.name}") for each in self.functions},
        }

    @property
    def instructions(self) -> str:
        """What the model reads."""
        known = [
            each.model_dump(include={"name", "description", "parameters"}, exclude_none=True) for each in self.functions
        ]
        listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in known)
        call = 'a JSON object {"name": "the function\'s name", "arguments": {its arguments}}'
        if self.alone is not None:
            how = "Answer by calling this function: write its arguments as a JSON object."
        elif self.words:
            how = f'To call one of these functions, answer with {call}. Else answer with {{"answer": "your words"}}.'
        else:
            how = f"Answer by calling one of these functions: write {call}."
        return f"# Functions\n\n{listed}\n\n{how}"

    def reader(self) -> Reader:
        """What makes OpenAI's deltas of one answer's text."""
        return Reader(not self.functions, None if self.alone is None else self.alone.name)

    def reason(self, reason: str, called: bool) -> str:
        """OpenAI's word for how a finished answer ended, a whole call where ``called``: one that had to be this very
        call just ends."""
        return "tool_calls" if reason == "stop" and called and not self.named else reason


def calling(request: ChatRequest) -> Calls:
    """What the answer may call."""
    choice = request.tool_choice or "auto"
    if not request.tools or choice == "none":
        return Calls()
    functions = tuple(tool.function for tool in request.tools)
    if isinstance(choice, NamedTool):
        functions = tuple(each for each in functions if each.name == choice.function.name)
    return Calls(functions, isinstance(choice, NamedTool), choice == "auto")


def instructed(messages: list[dict[str, Any]], calls: Calls) -> list[dict[str, Any]]:
    """The conversation, in the SDK's form, whose system message ends in what the model must know of the functions."""
    if not calls.functions:
        return messages
    instructions = calls.instructions
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": f"You are a helpful assistant.\n\n{instructions}"}, *messages]
    content = messages[0]["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{instructions}"
    else:
        content = [*content, {"type": "text", "text": f"\n\n{instructions}"}]
    return [{"role": "system", "content": content}, *messages[1:]]


def written(calls: Iterable[ToolCall]) -> str:
    """Earlier calls, as the model would write them."""
    return "\n".join(
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}' for call in calls
    )


class Reader:
    """Text as it comes into deltas of OpenAI's message. :meth:`end` follows the last.

    An answer is words alone, or one function's arguments, or, where neither is known before, ``{"name": ...,
    "arguments": ...}`` or ``{"answer": ...}``, as the server writes JSON.
    """

    def __init__(self, plain: bool, name: str | None = None) -> None:
        self.called = False
        self._plain, self._name = plain, name
        self._text = self._held = ""
        self._words = False  # of {"answer": ...}

    def read(self, text: str) -> list[dict[str, Any]]:
        if self._plain:
            return [{"content": text}] if text else []
        self._text += text
        if self._name is not None:
            begun, self.called = self.called, True
            return ([] if begun else [_begin(self._name)]) + ([_more(text)] if text else [])
        self._held += text
        found: list[dict[str, Any]] = []
        if not (self._words or self.called):
            if self._held.startswith(_WORDS):
                self._words, self._held = True, self._held.removeprefix(_WORDS)
            elif call := _CALL.match(self._held):
                self.called, self._held = True, self._held[call.end() :]
                found.append(_begin(call[1]))
        if self._words and (known := _WHOLE_CHARACTERS.match(self._held)) and known[0]:
            self._held = self._held[known.end() :]
            found.append({"content": json.loads(f'"{known[0]}"', strict=False)})
        elif self.called and (arguments := self._held.removesuffix("}")):  # the last one closes what the call stands in
            self._held = self._held[len(arguments) :]
            found.append(_more(arguments))
        return found

    def end(self) -> list[dict[str, Any]]:
        """What was held back. From here on ``called`` is whether a call is whole: max_tokens or a stop string may have
        cut it, or have come with its last character."""
        begun = self.called
        try:
            json.loads(self._text)
        except (ValueError, RecursionError):
            self.called = False
        return [_more(self._held)] if begun and self._held and not self.called else []


def message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that these deltas come to."""
    words: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        words.append(delta.get("content") or "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    text = "".join(words)
    return {"content": text, "refusal": None} | ({"content": text or None, "tool_calls": calls} if calls else {})


def _begin(name: str) -> dict[str, Any]:
    call = {"index": 0, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
    return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}


def _more(arguments: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}


def _object(**properties: Any) -> dict[str, Any]:
    form = {"type": "object", "properties": properties, "required": list(properties)}
    return form | {"additionalProperties": False}


def _parameters(function: Function, root: str = "#") -> dict[str, Any]:
    """What its arguments must match, where that stands at ``root`` of a schema; what refers to places in it still does.

    Its objects are closed: others than the properties that it names could be written without end.
    """
    given = function.parameters or _NO_PARAMETERS
    schemas: list[dict[str, Any]] = []
    made = _copied(given, schemas)
    whole = not any("allOf" in schema for schema in schemas)  # else no part of it knows all properties
    for schema in schemas:
        if isinstance(target := schema.get("$ref"), str) and target.startswith("#"):
            schema["$ref"] = root + target[1:]
        if whole and "properties" in schema and not {"additionalProperties", "patternProperties"} & set(schema):
            schema["additionalProperties"] = False
    return dict(made)


def _copied(schema: Any, schemas: list[dict[str, Any]]) -> Any:
    """A copy; ``schemas`` gets it, and each schema in it."""
    if isinstance(schema, list):
        return [_copied(each, schemas) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            copy[name] = {each: _copied(named, schemas) for each, named in value.items()}
        else:
            copy[name] = value if name in _DATA else _copied(value, schemas)
    schemas.append(copy)
    return copy


_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def shape(request: ChatRequest) -> dict[str, Any]:
    """At most one of the options that constrain an answer. Raises ApiError where two would."""
    found = list(_asked(request))
    if len(found) > 1:
        words = f"{found[0][0]} and {found[1][0]} exclude each other; send one of them"
        raise ApiError(400, words, found[1][0], "invalid_value")
    return {option: value for _, option, value in found}


def names(request: ChatRequest) -> dict[str, str]:
    """What a refusal is to call the fields that a request may have in several places, by what it calls them."""
    own = {FIELDS["draft"]: "prediction"} if request.prediction else {}
    if not request.mm_processor_kwargs:
        own |= {FIELDS[name]: f"{FIELDS['tile_policy']}.{name}" for name in ("min_pixels", "max_pixels")}
    return own | _names_of_shape(request)


def _names_of_shape(request: ChatRequest) -> dict[str, str]:
    for path, option, _ in _asked(request):
        if path == "tools":
            calls = calling(request)
            tools = [tool.function.name for tool in request.tools or ()]
            parameters = {each.name: f"tools[{tools.index(each.name)}].function.parameters" for each in calls.functions}
            inside = {f"{FIELDS[option]}.$defs.{name}": path for name, path in parameters.items()}
            return inside | {FIELDS[option]: "tools" if calls.alone is None else parameters[calls.alone.name]}
        if path != "response_format":
            return {FIELDS[option]: path}
    return {}


def _asked(request: ChatRequest) -> Iterator[tuple[str, str, Any]]:
    """The field of the request, the option and its value."""
    form, asked, own = request.response_format, request.structured_outputs, request.tessera
    if isinstance(form, JsonObject):
        yield "response_format", "json_object", True
    if isinstance(form, JsonSchema):
        yield "response_format", "json_schema", form.json_schema.schema_
    if (calls := calling(request)).functions:
        yield "tools", "json_schema", calls.schema
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "regex", _one_of(request.guided_choice)),
        ("structured_outputs.json", "json_schema", getattr(asked, "json_", None)),
        ("structured_outputs.regex", "regex", getattr(asked, "regex", None)),
        ("structured_outputs.choice", "regex", _one_of(getattr(asked, "choice", None))),
        ("structured_outputs.json_object", "json_object", getattr(asked, "json_object", None) or None),
        ("tessera.choices", "choices", getattr(own, "choices", None)),
        ("tessera.regex", "regex", getattr(own, "regex", None)),
    ]
    yield from (each for each in given if each[2] is not None)


def _one_of(texts: Sequence[str] | None) -> str | None:
    """The expression that these texts match alone: written as any answer is, not scored as labels are."""
    return None if texts is None else "|".join(_META.sub(r"\\\g<0>", text) for text in texts)
