"""The running ensemble on the default checkpoint: every way in, every kind of request."""

import base64
import json
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from faults.asking import bytes_input
from http_door import QUESTION, generate_body, post

import scene
from tessera.models.family import checkpoint_id
from tessera_client import Client, ServedModel

pytestmark = pytest.mark.server

LONG = "Describe the room."
CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"


def infer(server, timeout: int = 0, **texts: str | bytes) -> tuple[int, dict]:
    """Status and outputs, or the error, of these inputs to the unary front as tensors in JSON."""
    values = {name: each if isinstance(each, str) else base64.b64encode(each).decode() for name, each in texts.items()}
    inputs = [{"name": n, "datatype": "BYTES", "shape": [1], "data": [value]} for n, value in values.items()]
    body = {"inputs": inputs, "parameters": {"timeout": timeout} if timeout else {}}
    status, text = post(f"{server.http_url}/v2/models/vlm_unary/infer", body)
    answer = json.loads(text)
    return status, {output["name"]: output["data"] for output in answer.get("outputs", ())} or answer


@pytest.mark.parametrize("stage", ["vision_encoder", "language_model"])
def test_a_stage_has_sent_its_first_tensor_before_it_is_ready(server, stage):
    """With it the server shares its pool of GPU memory: not in a burst (tessera/tritonserver/gpu_pool.py)."""
    log = server.log_path.read_text()
    before_ready = log.partition(f"successfully loaded '{stage}'")[0]
    assert f"{stage}: sends its first tensor, on cpu" in before_ready


def test_every_way_in_gives_the_same_answer(server, doors, picture):
    answer = doors["grpc"].ask(picture, QUESTION, max_tokens=8)
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    assert answer.usage.image_tokens > 0
    assert answer.usage.prompt_tokens > answer.usage.image_tokens
    assert answer.timings.vision > 0
    assert answer.timings.first_token > 0

    for door in doors.values():
        assert door.ask(picture, QUESTION, max_tokens=8).text == answer.text
        with door.stream(picture, QUESTION, max_tokens=8) as stream:
            assert "".join(delta.text for delta in stream) == answer.text

    status, text = post(f"{server.http_url}/v2/models/vlm_unary/generate", generate_body(picture))
    assert status == 200
    assert json.loads(text)["text_output"] == answer.text

    # As in Triton's vLLM backend the input comes back in front of the answer unless it is excluded.
    status, outputs = infer(server, text_input=QUESTION, image=picture, sampling_parameters='{"max_tokens": "8"}')
    assert (status, outputs["text_output"], outputs["finish_reason"]) == (200, [QUESTION + answer.text], ["stop"])

    status, text = post(f"{server.http_url}/v2/models/vlm/generate_stream", generate_body(picture))
    assert status == 200
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == answer.text
    assert [event["finish_reason"] for event in events][-1] == "stop"


def test_messages_images_and_no_image(client, picture):
    other_picture = scene.encode_jpeg(scene.sample(8, "heldout"))
    alone = client.ask(picture, QUESTION, max_tokens=8)
    url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    assert client.chat([{"role": "user", "content": content}], max_tokens=8).text == alone.text

    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "Is there a door?"},
    ]
    assert client.chat(turns, max_tokens=8).usage.image_tokens == alone.usage.image_tokens

    two = client.ask([picture, other_picture], QUESTION, max_tokens=8, max_tiles=1)
    assert two.usage.image_tokens == 2 * client.ask(picture, QUESTION, max_tokens=8, max_tiles=1).usage.image_tokens
    bare = client.ask(picture, QUESTION, max_tokens=8, tile_policy={"name": "two-tile"})
    assert bare.usage.image_tokens == two.usage.image_tokens

    text_only = client.ask(None, "Hello?", max_tokens=4, ignore_eos=True)
    assert text_only.usage.image_tokens == 0
    assert text_only.usage.completion_tokens == 4
    assert text_only.finish_reason == "length"


def test_a_server_as_it_comes_verifies_drafts(client, picture):
    """What a draft says rightly counts, whatever it says the answer is the same."""
    plain = client.ask(picture, LONG, max_tokens=32)
    assert plain.usage.drafted_tokens == plain.usage.accepted_tokens == 0

    right, wrong = (client.ask(picture, LONG, max_tokens=32, draft=text) for text in (plain.text, "no room at all"))
    assert right.usage.accepted_tokens > 0
    assert right.text == wrong.text == plain.text


def test_a_control_request_cancels_by_request_id(server):
    """Cancelling the RPC does not reach a running ensemble step; a CANCEL to the language model does."""
    sampling = bytes_input("sampling_parameters", [b'{"max_tokens": 7000, "ignore_eos": true}'])
    asked = {"vlm": [bytes_input("text_input", [LONG.encode()]), sampling]}
    asked["language_model"] = [bytes_input("CANCEL", [b"to-be-cancelled"])]
    events: queue.Queue = queue.Queue()
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as working,
        grpcclient.InferenceServerClient(server.grpc_url) as control,
    ):
        working.start_stream(lambda result, error: events.put((result, error)))
        control.start_stream(lambda result, error: None)
        working.async_stream_infer("vlm", asked["vlm"], request_id="to-be-cancelled")
        reason = None
        while not reason:
            result, error = events.get(timeout=60)
            assert error is None
            if reason is None:  # the first token
                control.async_stream_infer("language_model", asked["language_model"])
            reason = result.as_numpy("finish_reason")[0]
        for client in (working, control):
            client.stop_stream()
    assert reason == b"cancelled" and 0 < result.as_numpy("usage")[1] < 7000


def test_a_client_is_told_which_checkpoint_is_served_while_it_asks(server):
    """On one stream tritonserver 2.51 would sooner or later abort."""
    for url in (server.grpc_url, server.http_url):
        with Client(url) as client, ThreadPoolExecutor(1) as asking:
            answers = asking.submit(lambda client=client: list(client.ask_many(((None, "Hi."),) * 16, max_tokens=1)))
            told = [client.served()]
            while not answers.done():
                told.append(client.served())
            assert set(told) == {ServedModel(checkpoint_id(CHECKPOINT).hex(), "internvl")}


def test_a_deadline_is_named_with_or_without_tokens(server, picture):
    """timeout is tritonserver's own parameter, in microseconds; the generate endpoints have no place for it."""
    status, answer = infer(server, 1000, text_input=QUESTION, image=picture)
    assert status == 503 and "UNAVAILABLE: deadline exceeded after" in answer["error"]
    long = '{"max_tokens": 7000, "ignore_eos": true}'
    status, answer = infer(server, 3_000_000, text_input=QUESTION, image=picture, sampling_parameters=long)
    assert (status, answer["finish_reason"]) == (200, ["deadline"]) and 0 < answer["usage"][1] < 7000
    body = generate_body(picture, timeout_us=1000)
    _, text = post(f"{server.http_url}/v2/models/vlm/generate_stream", body)
    assert "UNAVAILABLE: deadline exceeded after" in text
