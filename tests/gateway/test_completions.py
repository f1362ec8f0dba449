"""Every field of a chat completion: where it goes, and how its answer looks; and /v1/responses, by OpenAI's client."""

import base64
import json
from dataclasses import asdict, replace
from typing import Any

import httpx
import openai
import pytest
from clients.fake_transport import FINGERPRINT, SCORES, USAGE, Hang, final
from gateway_doubles import Asked, gateway
from pydantic import BaseModel

from tessera_client import Cascade, Delta, Unavailable
from tessera_gateway import protocol, translation

JPEG = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()
TOKEN: dict[str, Any] = {"token_id": 5, "text": "yes", "logprob": -0.5}
TOKEN["top"] = [{"token_id": 6, "text": "\ufffd", "logprob": -2.0}, {"text": "no", "logprob": float("-inf")}]


def sampled(door: Asked, **fields: Any) -> dict[str, Any]:
    """What reached the server as sampling parameters."""
    response = door.ask(**fields)
    assert response.status_code == 200, response.text
    return json.loads(door.fake.requests[-1][0].sampling or "{}")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in data]


def test_a_whole_answer() -> None:
    used = replace(USAGE, drafted_tokens=5, accepted_tokens=3)
    door = gateway([replace(final("yes", "length"), choices=SCORES, logprobs=[TOKEN], usage=used)])
    body = door.ask(logprobs=True, top_logprobs=1).json()
    assert body.pop("id").startswith("chatcmpl-") and body.pop("created") > 0
    others = [  # half a character, and what JSON cannot hold
        {"token": "\ufffd", "logprob": -2.0, "bytes": None},
        {"token": "no", "logprob": -9999.0, "bytes": [110, 111]},
    ]
    entry = {"token": "yes", "logprob": -0.5, "bytes": [121, 101, 115], "top_logprobs": others}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "yes", "refusal": None},
        "logprobs": {"content": [entry], "refusal": None},
        "finish_reason": "length",
    }
    timings = {"preprocess": 1, "vision_queue": 2, "vision": 3, "queue": 4, "first_token": 5, "decode": 6}
    drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": drafts}
    assert body == {
        "object": "chat.completion",
        "model": "vlm",
        "system_fingerprint": FINGERPRINT,
        "choices": [choice],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, **details},
        "tessera": {"timings": timings, "choices": [asdict(score) for score in SCORES], "image_tokens": 4},
    }


def test_a_cascades_end_is_told() -> None:
    end = replace(final("yes"), cascade=Cascade(0.5, True))
    policy = {"cascade": {"margin": 1.5, "full": "native"}}
    door = gateway([end], [end])
    told = [door.ask(tessera={"tile_policy": policy}).json(), events(door.ask(stream=True))[-1]]
    assert [(each["tessera"]["margin"], each["tessera"]["escalated"]) for each in told] == [(0.5, True)] * 2


def test_a_streamed_answer() -> None:
    first = Delta("ye", logprobs=[TOKEN], fingerprint=FINGERPRINT)
    door = gateway([first, Delta("s"), final(" sir", "length")])
    chunks = events(door.ask(stream=True, logprobs=True))
    assert {chunk["system_fingerprint"] for chunk in chunks} == {FINGERPRINT}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    said = [{"role": "assistant", "content": ""}, *({"content": text} for text in ("ye", "s", " sir")), {}]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == said
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert [bool(chunk["choices"][0]["logprobs"]) for chunk in chunks] == [False, True, False, False, False]
    assert "usage" not in chunks[-1] and chunks[-1]["tessera"]["timings"]["decode"] == 6
    assert door.fake.requests[0][0].stream and door.fake.cancelled == []


def test_pictures_system_prompts_and_turns() -> None:
    door = gateway()
    content = [
        {"type": "text", "text": "compare"},
        {"type": "image_url", "image_url": {"url": JPEG}},
        {"type": "image_url", "image_url": {"url": JPEG, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": JPEG, "detail": "low"}},
    ]
    nulls = dict.fromkeys(("annotations", "audio", "function_call", "tool_calls"))  # as OpenAI's client has them
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a wire", "refusal": None, **nulls},
        {"role": "user", "content": "sure?"},
    ]
    assert door.ask(turns).status_code == 200
    request = door.fake.requests[0][0]
    assert request.images == (b"jpeg",) * 3
    images = [{"type": "image"}, {"type": "image", "detail": "high"}, {"type": "image", "detail": "low"}]
    assert json.loads(request.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "compare"}, *images]},
        {"role": "assistant", "content": "a wire"},
        {"role": "user", "content": "sure?"},
    ]


TEXT = {"type": "text", "text": "a door"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "flex",
    "parallel_tool_calls": False,
    "prompt_cache_key": "rooms",
    "safety_identifier": "me",
    "tools": [],
    "tool_choice": "none",
    "messages": [{"role": "user", "content": "hello", "name": "Ann"}],
}
SAME: dict[str, Any] = dict(
    temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop_token_ids=[3, 5], logit_bias={"5": -100, "7": 1.5}, seed=7,
    stop=["a", "b"], min_tokens=2, ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True,
    presence_penalty=1, frequency_penalty=-1.5, repetition_penalty=1.1, priority=-2, max_tokens=9,
)  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SAME, SAME),
    ({"stop": "end"}, {"stop": "end"}),
    ({"max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens": 9}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    ({"logprobs": False}, {}),
    (HARMLESS, {}),
    ({"n": 1, "stream": False, "temperature": None, "tools": None, "user": None}, {}),
    ({"vllm_xargs": {"no_repeat_ngram_size": 20, "debug": False}}, {"no_repeat_ngram_size": 20}),
    ({"vllm_xargs": {"draft": "a door"}}, {"draft": "a door"}),
    ({"vllm_xargs": {"draft": None}, "prediction": {"type": "content", "content": "a door"}}, {"draft": "a door"}),
    ({"prediction": {"type": "content", "content": [TEXT, TEXT]}}, {"draft": "a doora door"}),
    ({"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 7840}}, {"min_pixels": 784, "max_pixels": 7840}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": FORM}, {"json_schema": SCHEMA}),
    ({"tessera": {"regex": "a+"}}, {"regex": "a+"}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["yes", "2.5 (m)"]}, {"regex": r"yes|2\.5 \(m\)"}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"choice": ["a|b", "no"]}}, {"regex": r"a\|b|no"}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"json_object": False}}, {}),
    ({"tessera": {"tile_policy": "fast"}}, {"tile_policy": {"name": "fast"}}),
    ({"tessera": {"tile_policy": {"max_tiles": 2}}}, {"tile_policy": {"max_tiles": 2}}),
]


@pytest.mark.parametrize(("given", "expected"), FIELDS, ids=lambda each: str(each)[:60])
def test_every_field_reaches_the_server_under_its_name(given: Any, expected: Any) -> None:
    assert sampled(gateway(), **given) == expected


def test_several_answers() -> None:
    door = gateway([final("one")], [final("two", "length")], [final("three")])
    body = door.ask(n=3, seed=2**63 - 2, service_tier="flex").json()
    told = [(each["index"], each["message"]["content"], each["finish_reason"]) for each in body["choices"]]
    assert told == [(0, "one", "stop"), (1, "two", "length"), (2, "three", "stop")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"], body["service_tier"]) == (10, 16, "default")
    seeds = [json.loads(request.sampling)["seed"] for request, *_ in door.fake.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert len({name for _, name, _ in door.fake.requests}) == 3


def test_several_answers_streamed_whose_usage_is_a_chunk_of_its_own() -> None:
    door = gateway([Delta("o"), final("ne")], [Delta("t"), Delta("w"), final("o", "length")])
    *chunks, last = events(door.ask(n=2, stream=True, stream_options={"include_usage": True}))
    choices = [chunk["choices"][0] for chunk in chunks if "tessera" not in chunk]
    said = ["".join(each["delta"].get("content", "") for each in choices if each["index"] == i) for i in (0, 1)]
    assert said == ["one", "two"] and len(choices) == len(chunks)
    assert {(each["index"], each["finish_reason"]) for each in choices} == {
        (0, None),
        (1, None),
        (0, "stop"),
        (1, "length"),
    }
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 14 and last["tessera"]["image_tokens"] == 4


def test_cached_tokens_are_the_first_answers_whichever_ends_first() -> None:
    first, second = (replace(final("."), usage=replace(USAGE, cached_tokens=known)) for known in (4, 8))
    told = gateway([first], [second]).ask(n=2).json()["usage"]
    *_, last = events(
        gateway([Delta("a"), first], [second]).ask(n=2, stream=True, stream_options={"include_usage": True})
    )
    assert told["prompt_tokens_details"] == last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_one_answer_that_fails_ends_the_others() -> None:
    door = gateway([Unavailable("full")], [Delta("t"), Hang()], [Delta("u"), Hang()])
    assert door.ask(n=3).status_code == 503 and len(door.fake.cancelled) == 2
    door = gateway([Delta("a"), Unavailable("full")], [Delta("t"), Hang()])
    assert events(door.ask(n=2, stream=True))[-1]["error"]["message"] and len(door.fake.cancelled) == 1


def test_the_gateways_own_limit_is_for_requests_that_name_none() -> None:
    door = gateway(max_tokens=50)
    assert sampled(door) == {"max_tokens": 50}
    assert sampled(door, min_tokens=60) == {"min_tokens": 60, "max_tokens": 60}
    assert sampled(door, max_tokens=70) == {"max_tokens": 70}
    assert sampled(door, tessera={"choices": ["yes", "no"]}) == {"choices": ["yes", "no"]}


def test_every_field_of_a_request_is_in_the_table_above() -> None:
    shown = {name for given, _ in FIELDS for name, value in given.items() if value is not None}
    assert set(protocol.ChatRequest.model_fields) - shown == {"model", "stream_options"}
    assert set(translation.SAME_NAME) < shown


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
    picture = {"type": "input_image", "image_url": JPEG, "detail": "low"}
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
