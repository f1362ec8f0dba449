"""/v1/responses: asked by OpenAI's own client over a real port, and by hand where that one would not ask so."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from clients.fake_transport import USAGE, final
from gateway_doubles import Asked
from pydantic import BaseModel

from tessera_client import Delta, Unavailable

PICTURE = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()
ORDER = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done", "response.completed"),
]


class Room(BaseModel):
    name: str
    sockets: int


def sent(door: tuple[Asked, str]) -> tuple[dict[str, Any], list[Any], tuple[bytes, ...]]:
    """The sampling parameters, messages and pictures of the last request."""
    request = door[0].fake.requests[-1][0]
    return json.loads(request.sampling or "{}"), json.loads(request.messages or ""), request.images


def test_a_text(client: openai.OpenAI, play: Any, door: tuple[Asked, str]) -> None:
    play([replace(final("yes"), usage=replace(USAGE, cached_tokens=7))])
    answer = client.responses.create(
        model="vlm", input="A door?", instructions="Be brief.", max_output_tokens=5, temperature=0.5, top_p=0.9
    )
    told = answer.model_dump()
    (item,) = told.pop("output")
    assert told.pop("id").startswith("resp_") and item.pop("id").startswith("msg_") and told.pop("created_at") > 0
    part = {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}
    assert item.pop("content") == [part]
    assert {name: value for name, value in item.items() if value is not None} == {
        "type": "message", "status": "completed", "role": "assistant",
    }  # fmt: skip
    usage = told.pop("usage")
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 2, 12)
    assert usage["input_tokens_details"]["cached_tokens"] == 7 and told.pop("tessera")["image_tokens"] == 4
    assert {name: value for name, value in told.items() if value is not None} == {
        "object": "response", "status": "completed", "background": False, "instructions": "Be brief.",
        "max_output_tokens": 5, "metadata": {}, "model": "vlm", "parallel_tool_calls": True, "service_tier": "default",
        "store": False, "temperature": 0.5, "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto", "tools": [], "top_p": 0.9, "truncation": "disabled",
    }  # fmt: skip
    sampling, messages, _ = sent(door)
    assert sampling == {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
    assert messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "A door?"},
    ]


def test_pictures_and_a_conversation(client: openai.OpenAI, door: tuple[Asked, str]) -> None:
    picture = {"type": "input_image", "image_url": PICTURE, "detail": "low"}
    asked: Any = [
        {"role": "developer", "content": "Look closely."},
        {"role": "user", "content": [{"type": "input_text", "text": "A door?"}, picture]},
    ]
    answer = client.responses.create(model="vlm", input=asked, instructions="Be brief.")
    asked += [*answer.output, {"role": "user", "content": "Sure?"}]
    client.responses.create(model="vlm", input=asked, instructions="Be brief.", store=True, user="me", tools=[])
    _, messages, images = sent(door)
    assert images == (b"jpeg",) and [turn["role"] for turn in messages] == ["system", "user", "assistant", "user"]
    assert "".join(part["text"] for part in messages[0]["content"]) == "Be brief.\n\nLook closely."
    assert messages[1]["content"] == [{"type": "text", "text": "A door?"}, {"type": "image", "detail": "low"}]
    assert messages[2]["content"] == [{"type": "text", "text": answer.output_text}]


def test_the_clients_stream_helper_and_parse(client: openai.OpenAI, play: Any, door: tuple[Asked, str]) -> None:
    text = '{"name": "hall", "sockets": 2}'
    play([Delta(text[:9]), final(text[9:])], [final(text)])
    with client.responses.stream(model="vlm", input="Which room?", text_format=Room) as stream:
        events: list[Any] = list(stream)
        assert stream.get_final_response().output_parsed == Room(name="hall", sockets=2)
    assert [event.type for event in events] == ORDER
    assert [event.sequence_number for event in events] == list(range(len(ORDER)))
    last, deltas = events[-1].response, [event for event in events if event.type == "response.output_text.delta"]
    assert last.output_text == text and last.usage.output_tokens == 2
    assert [(event.delta, event.item_id) for event in deltas] == [
        (each, last.output[0].id) for each in (text[:9], text[9:])
    ]
    parsed = client.responses.parse(model="vlm", input="Which room?", text_format=Room)
    assert parsed.output_parsed == Room(name="hall", sockets=2)
    assert set(sent(door)[0]["json_schema"]["properties"]) == {"name", "sockets"}
    client.responses.create(model="vlm", input="?", text={"format": {"type": "json_object"}})
    assert sent(door)[0] == {"json_object": True}


def test_an_answer_that_was_cut_is_incomplete(client: openai.OpenAI, play: Any) -> None:
    play([final("yes", "length")], [final("yes", "length")])
    whole: Any = client.responses.create(model="vlm", input="A door?")
    *_, last = client.responses.create(model="vlm", input="A door?", stream=True)
    assert last.type == "response.incomplete"
    for answer in (whole, last.response):
        assert answer.status == answer.output[0].status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"


def test_an_error_has_its_status_or_its_events(client: openai.OpenAI, play: Any) -> None:
    play([Unavailable("full")], [Delta("ye"), Unavailable("full")], [Delta("ye"), final("", "deadline")])
    with pytest.raises(openai.InternalServerError, match="full"):
        client.responses.create(model="vlm", input="A door?", stream=True)
    for words in ("full", "ran out"):
        events: Any = list(client.responses.create(model="vlm", input="A door?", stream=True))
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert words in events[-2].message and words in events[-1].response.error.message
        assert events[-1].response.status == "failed" and events[-1].sequence_number == len(events) - 1


def test_no_response_is_kept(client: openai.OpenAI) -> None:
    for stored in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="nothing is stored here"):
            stored("resp_1")
