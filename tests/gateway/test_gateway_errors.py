"""What is refused, and in which words: every error is OpenAI's object with the status that clients expect."""

import json
from typing import Any

import httpx
import openai
import pytest
from clients.fake_transport import READY, USAGE, FakeTransport, final
from gateway_doubles import ASKED, HELLO, Asked, gateway, until

from tessera_client import Delta
from tessera_client.messages import ServerStatus
from tessera_gateway import protocol
from tessera_wire.errors import Cancelled, ConnectionFailed, DeadlineExceeded, InvalidRequest, ServerError, Unavailable


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def image(**target: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": target}]}]


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


CODES = {
    "is not supported by this server": "unsupported_parameter",
    "is not known": "unknown_parameter",
    "no model 'gpt'": "model_not_found",
    "pictures are not fetched from elsewhere": "picture_refused",
}
"""By the words of a refusal; with others it is invalid_value."""
SAVE = function("save")
PREDICTION = {"type": "content", "content": "a"}
ELSEWHERE = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://elsewhere/a.jpg"}]}]
REFUSED: dict[str, list[tuple[dict[str, Any], str | None, str]]] = {
    "chat/completions": [
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar", "is not supported by this server"),
        ({"tempratur": 1}, "tempratur", "is not known"),
        ({"messages": image(url="data:", size=1)}, "messages[0].content[0].image_url.size", "is not known"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"guided_json": 5}, "guided_json", "should be an object"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex exclude each other"),
        ({"vllm_xargs": {"draught": "a"}}, "vllm_xargs.draught", "is not known"),
        ({"vllm_xargs": {"draft": 5}}, "vllm_xargs.draft", "valid string"),
        ({"prediction": {"type": "tokens", "content": "a"}}, "prediction.type", "'content'"),
        ({"prediction": PREDICTION | {"content": [{"type": "image_url", "text": "a"}]}}, "prediction.content[0].type",
         "'text'"),
        ({"prediction": PREDICTION, "vllm_xargs": {"draft": "a"}}, None, "vllm_xargs.draft are the same"),
        ({"temperature": "0"}, "temperature", "valid number"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "'system', 'developer', 'user'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "type is text or image_url"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "the message has no content"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "at most 16 strings"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"top_logprobs": 2}, None, "top_logprobs needs logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 1}, None, "differ; send one"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options needs stream"),
        ({"tools": [SAVE, SAVE]}, None, "two tools have the same name"),
        ({"tool_choice": "required"}, None, "there is no tool"),
        ({"tools": [SAVE], "tool_choice": function("ring")}, None, "there is no tool 'ring'"),
        ({"tools": [SAVE], "logprobs": True}, None, "logprobs of calls are not possible"),
        ({"tools": [SAVE], "response_format": {"type": "json_object"}}, "tools", "response_format and tools exclude"),
        ({"tools": [function("a b")]}, "tools[0].function.name", "pattern"),
        ({"tools": [function("a", parameters={"type": "array"})]}, "tools[0].function.parameters", '"type": "object"'),
        ({"tools": [SAVE] * 129}, "tools", "at most 128"),
    ],
    "responses": [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"tools": [{"type": "web_search"}]}, "tools", "at most 0 items"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "is not supported by this server"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].type", "'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_image"),
        ({"model": "gpt"}, "model", "no model 'gpt'"),
        ({"instructions": "Be brief.", "input": ELSEWHERE}, "input[0].content[0].image_url.url",
         "pictures are not fetched from elsewhere"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [(path, *row) for path, rows in REFUSED.items() for row in rows],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_value_is_named(path: str, fields: dict[str, Any], param: str | None, words: str) -> None:
    door, asked = gateway(), ASKED if path != "responses" else {"model": "vlm", "input": "?"}
    answer = door("POST", f"/v1/{path}", json={**asked, **fields})
    error = refused(answer, 404 if "gpt" in words else 400)
    assert (error["param"], error["code"]) == (param, CODES.get(words, "invalid_value"))
    assert (f"{param} {words}" if words.startswith("is not ") else words) in error["message"]
    assert door.fake.requests == []


def test_a_body_full_of_faults_is_refused_at_the_first() -> None:
    """All of them, noted down, took 30 GB and two minutes for one body within the limit."""
    assert refused(gateway().ask(a=1, b=2, c=3), 400)["message"] == "a is not known (and 2 more faults)"
    for fields in (
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"stop": [1] * 1000},
        {"tessera": {"choices": [1] * 1000}},
        {f"unknown{number}": 1 for number in range(1000)},
    ):
        assert "more faults" not in refused(gateway().ask(**fields), 400)["message"]


def test_a_body_of_very_many_values_is_not_even_read() -> None:
    """A worker stood still for 13 s for one body within the limit."""
    for values in ([{}] * 60_000, [[0] * 101_000], ["a"] * 101_000):
        error = refused(gateway().ask(values), 413)
        assert error["code"] == "body_too_large" and "100,000 values" in error["message"]


def test_a_message_is_short_whatever_was_sent() -> None:
    error = refused(gateway().ask(**{"x" * 100_000: 1}), 400)
    assert len(error["message"]) <= 400 and len(error["param"]) <= 400 and error["code"] == "unknown_parameter"
    assert len(refused(gateway()("GET", "/" + "x" * 10_000), 404)["message"]) <= 400


def test_what_openai_has_and_we_do_not_is_not_in_the_request() -> None:
    assert not set(protocol.NOT_SERVED) & set(protocol.ChatRequest.model_fields)


def test_a_missing_field_and_a_body_that_is_no_json() -> None:
    door = gateway()
    error = refused(door("POST", "/v1/chat/completions", json={"model": "vlm"}), 400)
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    for body in (b"{", b"", b'{"model": NaN}x', b"\xff"):
        assert refused(door("POST", "/v1/chat/completions", content=body), 400)["code"] == "invalid_json"
    for body in (b"[]", b"5", b'{"model": "vlm", "messages": [], "temperature": NaN}'):
        assert refused(door("POST", "/v1/chat/completions", content=body), 400)["type"] == "invalid_request_error"


def test_what_any_web_page_could_send_is_refused() -> None:
    door = gateway()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = door("POST", "/v1/chat/completions", content=json.dumps(ASKED), headers={"Content-Type": kind})
        assert refused(answer, 415)["code"] == "unsupported_media_type" and not door.fake.requests
    kind = "Application/JSON; charset=utf-8"
    answer = door("POST", "/v1/chat/completions", content=json.dumps(ASKED), headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_an_unknown_model_path_or_method() -> None:
    door = gateway()
    error = refused(door.ask(model="gpt-4o"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'gpt-4o'; there is vlm" in error["message"]
    assert "/v1/embeddings" in refused(door("POST", "/v1/embeddings", json={}), 404)["message"]
    assert "takes no GET" in refused(door("GET", "/v1/chat/completions"), 405)["message"]


STATUSES = [
    (InvalidRequest("no picture"), 400, "invalid_request_error"),
    (DeadlineExceeded("late"), 504, "server_error"),
    (ConnectionFailed("nobody"), 503, "server_error"),
    (Unavailable("a stage died"), 503, "server_error"),
    (Unavailable("512 requests are in flight, 9 of them queued"), 429, "rate_limit_error"),
    (Cancelled("by somebody"), 499, "request_cancelled"),
    (ServerError("it broke"), 500, "server_error"),
]
INSIDE = {  # what a stage says of itself, and what is told of it
    "language_model failed: the model's logits are NaN": "the model's logits are NaN",
    "preprocess failed on this request; see the log": "the server failed; see the log",
}
STATUSES += [(ServerError(words), 500, "server_error") for words in INSIDE]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status", "kind"), STATUSES, ids=[str(error) for error, *_ in STATUSES])
def test_the_servers_errors_have_a_status_of_their_own(error: Any, status: int, kind: str, streamed: bool) -> None:
    response = gateway([error]).ask(stream=streamed)
    told = refused(response, status)
    assert told["type"] == kind and told["message"] == INSIDE.get(str(error), str(error))
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_openais_client_reads_a_stream_and_what_ends_it(
    client: openai.OpenAI, play: Any, door: tuple[Asked, str]
) -> None:
    asked: Any = {"model": "vlm", "messages": HELLO}
    play([Unavailable("512 requests are in flight")], [Delta("a"), ServerError("it broke")], [Delta("ye"), final("s")])
    with pytest.raises(openai.RateLimitError, match="512 requests"):
        client.chat.completions.create(**asked, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="it broke") as error:
        for chunk in client.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content
    assert text == "a" and error.value.type == "server_error"
    counters = door[0].app.state.counters
    until(lambda: counters.total('requests_total{status="500"}') == 1)  # as if it had come in time
    with client.chat.completions.stream(**asked) as stream:
        assert [event.delta for event in stream if event.type == "content.delta" and event.delta] == ["ye", "s"]
        assert stream.get_final_completion().choices[0].message.content == "yes"


def test_an_answer_cut_short_is_no_answer() -> None:
    for reason, status in (("deadline", 504), ("cancelled", 499)):
        late = Delta("half", reason, USAGE)
        assert refused(gateway([late]).ask(), status)["code"] == reason
        assert f'"code":"{reason}"' in gateway([late]).ask(stream=True).text


def test_health_follows_the_servers() -> None:
    assert gateway()("GET", "/health").json() == {"ready": True}
    for status in (ServerStatus(False, "2.51.0", READY.models), ConnectionFailed("nobody")):
        door = gateway()
        door.app.state.client._transport = FakeTransport(status=status)
        assert door("GET", "/health").status_code == 503


def test_a_body_over_the_limit_is_refused_before_and_while_it_is_read() -> None:
    door = gateway([final()], max_body_mib=1)
    for method, path in (("GET", "/v1/models"), ("POST", "/nowhere"), ("POST", "/v1/batches")):  # which read none
        response = door(method, path, content=b" " * ((1 << 20) + 1))
        assert refused(response, 413)["code"] == "body_too_large" and response.headers["connection"] == "close"
    for size, status, code in ((1 << 20, 400, "invalid_json"), ((1 << 20) + 1, 413, "body_too_large")):
        assert refused(door("POST", "/v1/chat/completions", content=b" " * size), status)["code"] == code
    before = door.app.state.counters.total("body_bytes_total")

    async def parts() -> Any:
        for _ in range(64):
            yield b" " * (1 << 16)

    response = door("POST", "/v1/chat/completions", content=parts())
    assert refused(response, 413)["code"] == "body_too_large" and response.headers["connection"] == "close"
    assert door.app.state.counters.total("body_bytes_total") == before + (1 << 20) + (1 << 16)
    assert door.fake.requests == []
