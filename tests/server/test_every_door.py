"""Every door to the real server: answers that are constrained, labels that are scored, a question beside a job, and
what request parameters mean beside what the server adds of its own."""

import json
import math
import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from faults.asking import bytes_input
from http_door import QUESTION, post

from tessera_client import Client, InvalidRequest

pytestmark = pytest.mark.server

JOB = 128
SCHEMA = {
    "type": "object",
    "properties": {"wire": {"enum": ["yes", "no"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["wire", "count"],
    "additionalProperties": False,
}


def test_answers_match_at_every_door_and_what_cannot_be_is_refused(doors, picture):
    for client in doors.values():
        answer = client.ask(picture, QUESTION, json_schema=SCHEMA)
        assert list(json.loads(answer.text)) == ["wire", "count"] and answer.finish_reason == "stop"
        assert json.loads(answer.text)["wire"] in ("yes", "no")
        hot = client.ask(picture, QUESTION, regex="(door|wire)( [0-9]{2}){1,3}", temperature=1.5, seed=3)
        assert re.fullmatch("(door|wire)( [0-9]{2}){1,3}", hot.text)
        with client.stream(picture, QUESTION, json_schema=json.dumps(SCHEMA)) as stream:
            assert "".join(delta.text for delta in stream) == answer.text
        with pytest.raises(InvalidRequest, match=r"json_schema\.items: the keyword 'if' is not supported"):
            client.ask(picture[:500], QUESTION, json_schema={"items": {"if": {}}})  # before the picture is looked at
        plain = client.ask(picture, QUESTION, max_tokens=8)
        assert client.ask(picture, QUESTION, max_tokens=8, regex="(?s).*").text == plain.text


def test_a_schema_that_would_take_minutes_is_refused_and_others_are_answered(client, picture):
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    with pytest.raises(InvalidRequest, match="json_schema is too complex: it takes more than 1 s"):
        client.ask(picture, QUESTION, json_schema=endless)
    assert client.ask(picture, QUESTION, json_schema=SCHEMA).finish_reason == "stop"


def test_yes_or_no_is_the_plain_answer_with_its_probability(doors, client, picture):
    plain = client.ask(picture, QUESTION, max_tokens=8)
    first = client.ask(picture, QUESTION, max_tokens=1, logprobs=0).logprobs[0]["logprob"]
    for door in doors.values():
        scored = door.ask(picture, QUESTION, choices=["no", "yes"])
        assert (scored.text, scored.finish_reason, scored.logprobs) == (plain.text, "stop", None)
        assert [score.label for score in scored.choices] == ["no", "yes"]
        best = max(scored.choices, key=lambda score: score.probability)
        assert best.label == plain.text and best.logprob == pytest.approx(first, abs=1e-3)
        assert best.probability == pytest.approx(math.exp(best.logprob))
        assert sum(score.normalized for score in scored.choices) == pytest.approx(1)
        assert scored.usage.completion_tokens == 1 and scored.usage.prompt_tokens == plain.usage.prompt_tokens
        with door.stream(picture, QUESTION, choices=["no", "yes"]) as stream:
            assert [(delta.text, delta.choices is not None) for delta in stream] == [(plain.text, True)]
    assert plain.choices is None


def noise(number: int) -> bytes:
    """One that no other number gives."""
    pixels = np.random.default_rng(number).integers(0, 255, (14, 14, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.resize(pixels, (448, 448)))[1])


def test_a_question_waits_for_what_is_under_way_by_every_door(server, doors):
    """How many of the job's answers come before a question's, by each door; and before one of the job's priority."""
    done, answered = threading.Semaphore(0), []
    waited = []
    with Client(server.grpc_url, timeout=300) as client, ThreadPoolExecutor(JOB) as pool:

        def ask(number: int) -> None:
            answered.append(
                client.ask(noise(number), QUESTION, max_tokens=4, max_tiles=1, ignore_eos=True, priority=10)
            )
            done.release()

        asked = [pool.submit(ask, number) for number in range(JOB)]
        for _ in range(3):
            assert done.acquire(timeout=120)
        for number, (door, priority) in enumerate([*((each, 0) for each in doors.values()), (doors["grpc"], 10)]):
            door.ask(None, QUESTION, max_tokens=1)  # so that the connection is there
            before = len(answered)
            door.ask(noise(JOB + number), QUESTION, max_tokens=4, priority=priority)
            waited.append(len(answered) - before)
        for each in asked:
            each.result()
    *questions, equal = waited
    assert 2 * max(questions) < equal, waited  # how many are under way in the stages depends on the machine


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
        ({"max_token": 2}, "unknown key 'max_token'; did you mean 'max_tokens'"),
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
