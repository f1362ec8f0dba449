"""A request's parameters on their way through the real server: every door, and what the server adds of its own."""

from __future__ import annotations

import json
import queue

import pytest
import tritonclient.grpc as grpcclient
from faults.asking import bytes_input
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


DOORS = [("vlm", "generate_stream"), ("vlm_stream", "generate_stream"), ("vlm_unary", "generate")]


@pytest.mark.parametrize(("model", "door"), DOORS)
def test_generate(server, model, door):
    url = f"{server.http_url}/v2/models/{model}/{door}"
    flags = {"exclude_input_in_output": True, "stream": False}
    for more in ({"parameters": {**WANTED, **OWN, **flags}}, {"id": "seven", "model": model, **WANTED, **flags}):
        (event,) = answers(*post(url, {"text_input": TEXT, **more}))
        assert event["usage"][1] == 2 and TEXT not in event["text_output"]
    both = {"text_input": TEXT, "sampling_parameters": '{"ignore_eos": true}', "parameters": {"max_tokens": 2}}
    assert answers(*post(url, both))[-1]["usage"][1] == 2
    for more, words in (
        ({"max_token": 2}, "unknown key 'max_token'"),
        ({"parameters": {"repetition_penalty": 0.0}}, "repetition_penalty must be above 0"),
        ({"parameters": {"max_tokens": 3}, "max_tokens": 2}, "'max_tokens' is given twice: 3"),
    ):
        status, text = post(url, {"text_input": TEXT, **more})
        assert status == 400 and words in json.loads(text.removeprefix("data: "))["error"], text


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
    text = bytes_input("text_input", [TEXT.encode()])
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
                if (told := result.as_numpy("usage")) is not None:
                    usage = max(usage, told[1])
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
            plain.stop_stream()
            assert usage == 2
