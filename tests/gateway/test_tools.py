"""Functions that an answer may call: what the server is asked for them, and what becomes of its answer."""

import json
from typing import Any

import openai
import pytest
from clients.fake_transport import final
from gateway_doubles import ASKED, HELLO, Asked, gateway
from openai.lib.streaming.chat import ChatCompletionStreamState

from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters
from tessera_client import Delta

ROOM = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/Name"}, "sockets": {"type": "integer"}},
    "required": ["name", "sockets"],
    "additionalProperties": False,
    "$defs": {"Name": {"enum": ["hall", "kitchen"]}},
}
SAVE = {"type": "function", "function": {"name": "save_room", "description": "Keeps a room.", "parameters": ROOM}}
RING = {"type": "function", "function": {"name": "ring"}}
NAMED = {"type": "function", "function": {"name": "save_room"}}
ARGUMENTS = '{"name": "hall", "sockets": 2}'
CALL = f'{{"name": "save_room", "arguments": {ARGUMENTS}}}'
BEGUN = CALL.index(ARGUMENTS)
WORDS = '{"answer": "say \\"no\\"\\n\u00e9 {}"}'


def asked(door: Asked) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The schema and the messages that reached the server."""
    request = door.fake.requests[-1][0]
    return json.loads(request.sampling or "{}")["json_schema"], json.loads(request.messages)


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether the engine would let a model write this text."""
    matcher = grammar.compiled(SamplingParameters.parse({"json_schema": schema}), grammar._bytes())
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def said(door: Asked, **fields: Any) -> dict[str, Any]:
    response = door.ask(**fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """A stream's answer, put together by OpenAI's client."""
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**{**ASKED, **fields}, stream=True):
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0]


CASES: list[tuple[dict[str, Any], str, str, str, str]] = [
    # fields, what the model writes, and of the answer: words, the call's name, the reason
    ({"tools": [SAVE, RING], "tool_choice": NAMED}, ARGUMENTS, "", "save_room", "stop"),
    ({"tools": [SAVE], "tool_choice": "required"}, ARGUMENTS, "", "save_room", "tool_calls"),
    ({"tools": [SAVE, RING], "tool_choice": "required"}, CALL, "", "save_room", "tool_calls"),
    ({"tools": [RING, SAVE], "tool_choice": "auto"}, CALL, "", "save_room", "tool_calls"),
    ({"tools": [SAVE]}, CALL, "", "save_room", "tool_calls"),
    ({"tools": [RING, SAVE]}, WORDS, 'say "no"\n\u00e9 {}', "", "stop"),
]


@pytest.mark.parametrize(("fields", "text", "words", "name", "reason"), CASES)
def test_an_answer_becomes_words_or_a_call(
    client: openai.OpenAI,
    play: Any,
    door: tuple[Asked, str],
    fields: Any,
    text: str,
    words: str,
    name: str,
    reason: str,
) -> None:
    pieces = [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 7)]
    play([final(text)], *([*map(Delta, most), final(last)] for *most, last in pieces))
    whole = client.chat.completions.create(**{**ASKED, **fields}).choices[0]
    assert allows(asked(door[0])[0], text)
    for choice in (whole, streamed(client, **fields), streamed(client, **fields)):
        assert (choice.message.content or "", choice.finish_reason) == (words, reason)
        calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert calls == ([("function", name, ARGUMENTS)] if name else [])


def test_nothing_but_a_call_that_fits_can_be_written() -> None:
    door = gateway()
    door.ask(tools=[SAVE, RING], tool_choice="required")
    schema, _ = asked(door)
    assert allows(schema, CALL) and allows(schema, '{"name": "ring", "arguments": {}}')
    for text in ('{"name": "ring", "arguments": {"a": 1}}', CALL.replace("hall", "cellar"), WORDS, "no", ARGUMENTS):
        assert not allows(schema, text)


def test_objects_are_closed_that_do_not_say_whether_they_are() -> None:
    """As pydantic writes them; a small model would write properties for ever."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    free = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}}
    both = {"allOf": [inner, {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    for field, text, allowed in (
        (inner, '{"x": {"a": 1, "b": 2}}', False),
        (free, '{"x": {"a": 1, "b": 2}}', True),
        (both, '{"x": {"a": 1, "b": 2}}', True),
    ):
        function = {"name": "f", "parameters": {"type": "object", "properties": {"x": field}, "required": ["x"]}}
        door = gateway()
        door.ask(tools=[{"type": "function", "function": function}], tool_choice="required")
        assert allows(asked(door)[0], text) is allowed
        assert allows(asked(door)[0], text[:-1] + ', "y": 1}') is (field is both)


@pytest.mark.parametrize("cut", [5, 45, len(CALL) - 1])
def test_a_call_that_was_cut_is_told_as_far_as_it_came(cut: int) -> None:
    choice = said(gateway([final(CALL[:cut], "length")]), tools=[SAVE])
    assert choice["finish_reason"] == "length"
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == [CALL[BEGUN:cut]] * (cut > BEGUN)
    words = said(gateway([final(WORDS[:17], "length")]), tools=[SAVE])  # in the middle of a character
    assert WORDS[16] == "\\" and words["message"]["content"] == "say " and words["finish_reason"] == "length"


@pytest.mark.parametrize(("cut", "reason", "told"), [(len(CALL), "length", "length"), (BEGUN + 5, "stop", "stop")])
def test_whether_a_call_is_whole_is_its_own_text_to_say(cut: int, reason: str, told: str) -> None:
    """max_tokens may end an answer with the last character, and a stop string before it."""
    choice = said(gateway([final(CALL[:cut], reason)]), tools=[SAVE])
    assert choice["finish_reason"] == told
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == (ARGUMENTS if cut == len(CALL) else CALL[BEGUN:cut])


def test_the_model_reads_what_it_may_call() -> None:
    door = gateway()
    door.ask(tools=[SAVE, RING], tool_choice=NAMED)
    system, hello = asked(door)[1]
    assert system["role"] == "system" and [hello] == HELLO
    assert (
        '"save_room"' in system["content"] and "Keeps a room." in system["content"] and "ring" not in system["content"]
    )
    door.ask([{"role": "developer", "content": "Be brief."}, *HELLO], tools=[SAVE, RING])
    system = asked(door)[1][0]
    assert system["content"].startswith("Be brief.\n\n# Functions") and '"ring"' in system["content"]


def test_earlier_calls_and_what_came_of_them_are_text() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "save_room", "arguments": ARGUMENTS}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "kept"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rung"}]},
        {"role": "assistant", "content": "Then:", "tool_calls": [call]},
    ]
    door = gateway()
    assert door.ask(turns).status_code == 200
    roles, texts = [], []
    for turn in json.loads(door.fake.requests[-1][0].messages or ""):
        roles.append(turn["role"])
        parts = turn["content"]
        texts.append(parts if isinstance(parts, str) else "".join(part["text"] for part in parts))
    assert roles == ["user", "assistant", "user", "assistant"]
    response = "<tool_response>\n{}\n</tool_response>"
    assert texts == ["hello", CALL, response.format("kept") + "\n" + response.format("rung"), "Then:\n" + CALL]


def test_tools_that_may_not_be_called_change_nothing() -> None:
    door = gateway([final("hello")])
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert said(door, tools=[SAVE], tool_choice="none")["message"] == message
    assert door.fake.requests[-1][0].sampling is None and json.loads(door.fake.requests[-1][0].messages or "") == HELLO
