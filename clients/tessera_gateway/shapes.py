"""What an answer must be, in whichever way a request says so: one option of the SDK's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tessera_gateway.errors import ApiError
from tessera_gateway.protocol import ChatRequest, JsonObject, JsonSchema
from tessera_gateway.tools import calling
from tessera_gateway.wording import FIELDS

_META = re.compile(r"[\\.+*?()|\[\]{}^$]")


def shape(request: ChatRequest) -> dict[str, Any]:
    """At most one of the options that constrain an answer. Raises ApiError where two would."""
    found = list(_asked(request))
    if len(found) > 1:
        words = f"{found[0][0]} and {found[1][0]} exclude each other; send one of them"
        raise ApiError(400, words, found[1][0], "invalid_value")
    return {option: value for _, option, value in found}


def names(request: ChatRequest) -> dict[str, str]:
    """What a refusal is to call the field that says what the answer must be, by what it calls it."""
    for path, option, _ in _asked(request):
        if path == "tools" and (calls := calling(request)) is not None:
            tools = [tool.function.name for tool in request.tools or ()]
            parameters = {each.name: f"tools[{tools.index(each.name)}].function.parameters" for each in calls.functions}
            inside = {f"{FIELDS[option]}.$defs.{name}": path for name, path in parameters.items()}
            return inside | {FIELDS[option]: "tools" if calls.alone is None else parameters[calls.alone.name]}
        if path != "response_format":
            return {FIELDS[option]: path}
    return {}


def _asked(request: ChatRequest) -> Iterator[tuple[str, str, Any]]:
    """The field of the request, the option and its value."""
    if isinstance(request.response_format, JsonObject):
        yield "response_format", "json_object", True
    if isinstance(request.response_format, JsonSchema):
        yield "response_format", "json_schema", request.response_format.json_schema.schema_
    if (calls := calling(request)) is not None:
        yield "tools", "json_schema", calls.schema
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "regex", _one_of(request.guided_choice)),
    ]
    if (asked := request.structured_outputs) is not None:
        given += [
            ("structured_outputs.json", "json_schema", asked.json_),
            ("structured_outputs.regex", "regex", asked.regex),
            ("structured_outputs.choice", "regex", _one_of(asked.choice)),
            ("structured_outputs.json_object", "json_object", asked.json_object or None),
        ]
    if request.tessera is not None:
        given += [(f"tessera.{name}", name, getattr(request.tessera, name)) for name in ("choices", "regex")]
    yield from (each for each in given if each[2] is not None)


def _one_of(texts: Sequence[str] | None) -> str | None:
    """The expression that these texts match alone: written as any answer is, not scored as labels are."""
    return None if texts is None else "|".join(_META.sub(r"\\\g<0>", text) for text in texts)
