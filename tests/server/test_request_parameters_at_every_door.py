"""A request's parameters on their way through the real server: every door, and what the server adds of its own."""

from __future__ import annotations

import json
import queue

import numpy as np
import pytest
from http_door import post

pytestmark = pytest.mark.server

TEXT = "Describe the room."
WANTED = {"max_tokens": 2, "ignore_eos": True}
# What the server and its clients put beside a request; nothing of it is for a model.
OWN = {"priority": 0, "timeout": 60_000_000, "binary_data_output": False}


def answers(status: int, text: str) -> list[dict]:
    """The events of a stream, or the one answer."""
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines]


def tokens(events: list[dict]) -> int:
    return events[-1]["usage"][1]


DOORS = [("vlm", "generate_stream"), ("vlm_stream", "generate_stream"), ("vlm_unary", "generate")]


@pytest.mark.parametrize(("model", "door"), DOORS)
def test_generate(server, model, door):
    url = f"{server.http_url}/v2/models/{model}/{door}"
    for more in ({"parameters": {**WANTED, **OWN}}, {**WANTED, **OWN}, {"id": "seven", "model": model, **WANTED}):
        events = answers(*post(url, {"text_input": TEXT, "exclude_input_in_output": True, **more}))
        assert tokens(events) == 2
    both = {"text_input": TEXT, "sampling_parameters": '{"ignore_eos": true}', "parameters": {"max_tokens": 2}}
    assert tokens(answers(*post(url, both))) == 2


def test_penalties_reach_the_model(server):
    sampling = '{"no_repeat_ngram_size": 1, "priority": -3, "max_tokens": 12, "ignore_eos": true, "logprobs": true}'
    body = {"text_input": TEXT, "sampling_parameters": sampling, "repetition_penalty": 0.5, "presence_penalty": -2.0}
    (answer,) = answers(*post(f"{server.http_url}/v2/models/vlm_unary/generate", body))
    said = [entry["token_id"] for entry in json.loads(answer["logprobs"])]
    assert len(said) == len(set(said)) == 12


@pytest.mark.parametrize(("model", "door"), DOORS)
def test_biases_tokens_that_end_and_min_p(server, model, door):
    url, sampling = f"{server.http_url}/v2/models/{model}/{door}", {"max_tokens": 6, "ignore_eos": True}

    def ask(**more):
        body = {"text_input": TEXT, "sampling_parameters": json.dumps({**sampling, "logprobs": True, **more})}
        events = answers(*post(url, {**body, "stream": False}))
        said = [entry["token_id"] for event in events for entry in json.loads(event["logprobs"] or "[]")]
        return said, events[-1]["finish_reason"]

    assert ask(logit_bias={"40": 100}) == ([40] * 6, "length")
    assert ask(logit_bias={"40": 100}, stop_token_ids=[40])[1] == "stop"
    plain = ask()
    assert ask(temperature=2.0, seed=1, min_p=1.0) == plain
    for more in ({"logit_bias": {"99999999": 1}}, {"stop_token_ids": [99999999]}, {"logit_bias": {"1": 101}}):
        status, text = post(url, {"text_input": TEXT, "sampling_parameters": json.dumps(more)})
        assert status == 400 and next(iter(more)) in json.loads(text.removeprefix("data: "))["error"]


def test_flags_as_parameters(server):
    more = {"parameters": {**WANTED, "exclude_input_in_output": True, "stream": False}}
    for model, door in DOORS:
        events = answers(*post(f"{server.http_url}/v2/models/{model}/{door}", {"text_input": TEXT, **more}))
        assert len(events) == 1 and TEXT not in events[0]["text_output"]


@pytest.mark.parametrize(("model", "door"), DOORS)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parameters": {"max_token": 2}}, ["unknown key 'max_token'"]),
        ({"max_token": 2}, ["unknown key 'max_token'"]),
        ({"parameters": {"max_tokens": -1}}, ["max_tokens", "-1"]),
        ({"parameters": {"repetition_penalty": 0}}, ["repetition_penalty must be above 0"]),
        ({"sampling_parameters": '{"max_tokens": 3}', "max_tokens": 2}, ["'max_tokens' is given twice: 3", "2"]),
        ({"parameters": {"max_tokens": 3}, "max_tokens": 2}, ["'max_tokens' is given twice: 3", "2"]),
    ],
)
def test_generate_refuses(server, model, door, more, words):
    status, text = post(f"{server.http_url}/v2/models/{model}/{door}", {"text_input": TEXT, **more})
    assert status == 400
    assert all(word in json.loads(text.removeprefix("data: "))["error"] for word in words), text


def test_infer_over_http(server):
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
    sequence = {"sequence_id": 4, "sequence_start": True, "sequence_end": True}
    body = {"id": "eight", "inputs": [tensor], "parameters": {**WANTED, **OWN, **sequence}}
    status, text = post(f"{server.http_url}/v2/models/vlm_unary/infer", body)
    assert status == 200, text
    (usage,) = (output["data"] for output in json.loads(text)["outputs"] if output["name"] == "usage")
    assert usage[1] == 2
    status, text = post(f"{server.http_url}/v2/models/vlm_unary/infer", {**body, "parameters": {"max_token": 2}})
    assert status == 400 and "unknown key 'max_token'" in text


def test_grpc(server):
    import tritonclient.grpc as grpcclient

    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([TEXT.encode()], np.object_))
    own = {"priority": 1, "timeout": 60_000_000, "sequence_id": 4, "sequence_start": True, "sequence_end": True}
    with grpcclient.InferenceServerClient(server.grpc_url) as plain:
        result = plain.infer("vlm_unary", [text], request_id="nine", parameters=WANTED, **own)
        assert result.as_numpy("usage")[1] == 2
        for model in ("vlm", "vlm_stream"):
            arrived: queue.Queue = queue.Queue()
            plain.start_stream(lambda result, error, arrived=arrived: arrived.put((result, error)))
            plain.async_stream_infer(model, [text], enable_empty_final_response=True, parameters=WANTED, **own)
            usage = 0
            while True:
                result, error = arrived.get(timeout=60)
                assert error is None, error
                usage = max(usage, int(result.as_numpy("usage")[1]) if result.as_numpy("usage") is not None else 0)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
            plain.stop_stream()
            assert usage == 2
