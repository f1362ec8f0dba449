"""The running ensemble on the default checkpoint: every way in, every kind of request."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import server_metrics

import scene
from tessera.models.family import checkpoint_id
from tessera_client import Client, InvalidRequest, Models, ServedModel

pytestmark = pytest.mark.server

QUESTION = "Is there an exposed wire?"
LONG = "Describe the room."
CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"


@pytest.fixture(scope="module")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


@pytest.fixture(scope="module")
def other_picture() -> bytes:
    return scene.encode_jpeg(scene.sample(8, "heldout"))


@pytest.fixture(scope="module")
def client(server):
    with Client(server.grpc_url) as client:
        yield client


def post(url: str, body: dict) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate_body(picture: bytes, **more) -> dict:
    return {
        "text_input": QUESTION,
        "image": base64.b64encode(picture).decode(),
        "exclude_input_in_output": True,
        "sampling_parameters": '{"max_tokens": 8}',
        **more,
    }


@pytest.mark.parametrize("stage", ["vision_encoder", "language_model"])
def test_a_stage_has_sent_its_first_tensor_before_it_is_ready(server, stage):
    """With it the server shares its pool of GPU memory: not in a burst (tessera/tritonserver/gpu_pool.py)."""
    log = server.log_path.read_text()
    before_ready = log.partition(f"successfully loaded '{stage}'")[0]
    assert f"{stage}: the first tensor on cpu was sent" in before_ready


def test_every_way_in_gives_the_same_answer(server, client, picture):
    answer = client.ask(picture, QUESTION, max_tokens=8)
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    assert answer.usage.image_tokens > 0
    assert answer.usage.prompt_tokens > answer.usage.image_tokens
    assert answer.timings.vision > 0
    assert answer.timings.first_token > 0

    with client.stream(picture, QUESTION, max_tokens=8) as stream:
        assert "".join(delta.text for delta in stream) == answer.text
    with Client(server.http_url) as http:
        assert http.ask(picture, QUESTION, max_tokens=8).text == answer.text
    with Client(server.grpc_url, models=Models(vlm="vlm_stream")) as front:
        assert front.ask(picture, QUESTION, max_tokens=8).text == answer.text

    status, text = post(f"{server.http_url}/v2/models/vlm_unary/generate", generate_body(picture))
    assert status == 200
    assert json.loads(text)["text_output"] == answer.text

    status, text = post(f"{server.http_url}/v2/models/vlm/generate_stream", generate_body(picture))
    assert status == 200
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == answer.text
    assert [event["finish_reason"] for event in events][-1] == "stop"


def test_plain_tritonclient_infers_through_the_unary_front(server, client, picture):
    import tritonclient.grpc as grpcclient

    def tensor(name: str, values: np.ndarray, kind: str) -> grpcclient.InferInput:
        made = grpcclient.InferInput(name, list(values.shape), kind)
        made.set_data_from_numpy(values)
        return made

    plain = grpcclient.InferenceServerClient(server.grpc_url)
    result = plain.infer(
        "vlm_unary",
        [
            tensor("text_input", np.array([QUESTION.encode()], np.object_), "BYTES"),
            tensor("image", np.array([picture], np.object_), "BYTES"),
            tensor("sampling_parameters", np.array([b'{"max_tokens": "8"}'], np.object_), "BYTES"),
        ],
    )
    plain.close()
    # As in Triton's vLLM backend the input comes back in front of the answer unless it is excluded.
    assert result.as_numpy("text_output")[0].decode() == QUESTION + client.ask(picture, QUESTION, max_tokens=8).text
    assert result.as_numpy("finish_reason")[0] == b"stop"


def test_messages_images_and_no_image(client, picture, other_picture):
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

    text_only = client.ask(None, "Hello?", max_tokens=4, ignore_eos=True)
    assert text_only.usage.image_tokens == 0
    assert text_only.usage.completion_tokens == 4
    assert text_only.finish_reason == "length"


def test_tile_policies_change_the_number_of_image_tokens(client, picture):
    one = client.ask(picture, QUESTION, max_tokens=8, max_tiles=1)
    bare = client.ask(picture, QUESTION, max_tokens=8, tile_policy={"name": "two-tile"})
    assert bare.usage.image_tokens == 2 * one.usage.image_tokens


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: {"image": b"not a picture", "question": QUESTION}, "image 0"),
        (lambda p: {"image": p[: len(p) // 2], "question": QUESTION}, "image 0"),
        (lambda p: {"image": p, "question": "<image> and <image>?"}, "2"),
        (lambda p: {"image": p, "question": QUESTION, "temperature": -1}, "temperature"),
        (lambda p: {"image": p, "question": QUESTION, "beams": 4}, "beams"),
        (lambda p: {"image": [p] * 9, "question": QUESTION}, "9"),
    ],
)
def test_bad_requests_are_refused_by_name_and_harm_nobody(client, picture, make, words):
    options = make(picture)
    image, question = options.pop("image"), options.pop("question")
    with pytest.raises(InvalidRequest, match=words) as caught:
        client.ask(image, question, max_tokens=8, **options)
    assert "/" not in caught.value.message.replace("JPEG/PNG/WebP", "")  # no path leaks
    assert client.ask(picture, QUESTION, max_tokens=8).finish_reason == "stop"


def test_remote_urls_are_refused(client):
    for url in ("http://127.0.0.1/x.jpg", "https://example.com/x.jpg", "file:///etc/passwd"):
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        with pytest.raises(InvalidRequest, match="data:"):
            client.chat([{"role": "user", "content": content}])


def test_a_request_without_any_input_is_refused_not_swallowed(server):
    for model, endpoint in (("vlm_unary", "generate"), ("vlm", "generate_stream")):
        status, text = post(f"{server.http_url}/v2/models/{model}/{endpoint}", {"stream": False})
        assert status == 400
        assert "text_input" in text


def test_many_at_once_answer_as_one_by_one(client, picture, other_picture):
    jobs = [(picture if i % 2 else other_picture, f"{QUESTION}{' ' * (i // 2)}") for i in range(12)]
    alone = [client.ask(*job, max_tokens=8, max_tiles=3).text for job in jobs]
    together = [answer.text for answer in client.ask_many(jobs, concurrency=12, max_tokens=8, max_tiles=3)]
    assert together == alone


def test_a_control_request_cancels_by_request_id(server):
    """Cancelling the RPC does not reach a running ensemble step; a CANCEL to the language model does."""
    import queue

    import tritonclient.grpc as grpcclient

    def open_stream() -> tuple[grpcclient.InferenceServerClient, queue.Queue]:
        client, events = grpcclient.InferenceServerClient(server.grpc_url), queue.Queue()
        client.start_stream(lambda result, error: events.put((result, error)))
        return client, events

    def bytes_input(name: str, text: str) -> grpcclient.InferInput:
        tensor = grpcclient.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
        return tensor

    working, events = open_stream()
    sampling = bytes_input("sampling_parameters", '{"max_tokens": 7000, "ignore_eos": true}')
    working.async_stream_infer("vlm", [bytes_input("text_input", LONG), sampling], request_id="to-be-cancelled")
    first, error = events.get(timeout=60)
    assert error is None
    assert first.as_numpy("finish_reason")[0] == b""

    control, done = open_stream()
    control.async_stream_infer(
        "language_model", [bytes_input("CANCEL", "to-be-cancelled")], enable_empty_final_response=True
    )
    _, error = done.get(timeout=60)
    assert error is None
    reason, tokens = b"", 0
    while not reason:
        result, error = events.get(timeout=60)
        assert error is None
        reason, tokens = result.as_numpy("finish_reason")[0], result.as_numpy("usage")[1]
    assert reason == b"cancelled"
    assert 0 < tokens < 7000
    for client in (working, control):
        client.stop_stream()
        client.close()


def test_leaving_a_stream_early_raises_nothing_and_the_client_goes_on(client, picture):
    with client.stream(picture, LONG, max_tokens=4000, ignore_eos=True, max_tiles=1) as stream:
        next(iter(stream))
    assert client.ask(picture, QUESTION, max_tokens=8).finish_reason


def test_logprobs_seed_and_stop(client, picture):
    answer = client.ask(picture, LONG, max_tokens=6, logprobs=2, ignore_eos=True)
    assert len(answer.logprobs) == 6
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in answer.logprobs)
    sampled = [client.ask(picture, LONG, max_tokens=12, temperature=1.5, seed=3).text for _ in range(2)]
    assert sampled[0] == sampled[1]
    whole = client.ask(picture, LONG, max_tokens=24).text
    word = whole.split()[3]
    assert client.ask(picture, LONG, max_tokens=24, stop=word).text == whole[: whole.index(word)]


def test_clients_in_threads_get_their_own_answers(client, picture):
    def ask(n: int) -> tuple[int, int]:
        return n, client.ask(None, "Count.", max_tokens=n, ignore_eos=True).usage.completion_tokens

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(n == tokens for n, tokens in pool.map(ask, range(1, 25)))


def test_every_stage_answers_a_ping(server):
    for model in ("preprocess", "vision_encoder", "vlm_unary"):
        shape = [1, 1] if model == "vision_encoder" else [1]
        ping = {"inputs": [{"name": "PING", "datatype": "BYTES", "shape": shape, "data": ["?"]}]}
        status, text = post(f"{server.http_url}/v2/models/{model}/infer", ping)
        assert status == 200, text
    for model in ("language_model", "vlm_stream"):
        status, text = post(f"{server.http_url}/v2/models/{model}/generate_stream", {"PING": "?"})
        assert (status, text) == (200, "")
    assert server.failure() is None


def test_a_client_is_told_which_checkpoint_is_served(server):
    for url in (server.grpc_url, server.http_url):
        with Client(url) as client:
            assert client.served() == ServedModel(checkpoint_id(CHECKPOINT).hex(), "internvl")


def test_the_unary_front_keeps_an_errors_code(server, picture):
    body = {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [QUESTION]},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"beams": 4}']},
        ]
    }
    status, text = post(f"{server.http_url}/v2/models/vlm_unary/infer", body)
    assert status == 400
    assert "beams" in text


def test_the_metrics_page_shows_the_engine(server, client, picture):
    def page() -> dict[str, float]:
        return server_metrics.read(server.metrics_url)

    total = server_metrics.total
    before = page()
    answer = client.ask(picture, QUESTION, max_tokens=3, ignore_eos=True)
    deadline = time.monotonic() + 10
    # Requests of the tests before may still come to the page: this one's own tokens are waited for.
    least = {
        "tessera_time_to_first_token_seconds_count": 1,
        "tessera_prompt_tokens_total": answer.usage.prompt_tokens,
        "tessera_generated_tokens_total": 3,
    }
    while any(total(after, name) - total(before, name) < count for after in [page()] for name, count in least.items()):
        assert time.monotonic() < deadline, "the page is renewed four times a second"
        time.sleep(0.2)
    assert total(page(), "tessera_kv_blocks_total") > 0


def test_a_deadline_is_named_with_or_without_tokens(server, picture):
    """timeout is tritonserver's own parameter, in microseconds; the generate endpoints have no place for it."""

    def ask(microseconds: int, sampling: str) -> tuple[int, str]:
        texts = {"text_input": QUESTION, "image": base64.b64encode(picture).decode(), "sampling_parameters": sampling}
        inputs = [{"name": n, "datatype": "BYTES", "shape": [1], "data": [text]} for n, text in texts.items()]
        body = {"inputs": inputs, "parameters": {"timeout": microseconds}}
        return post(f"{server.http_url}/v2/models/vlm_unary/infer", body)

    status, text = ask(1000, "{}")
    assert status == 503
    assert "UNAVAILABLE: deadline exceeded after" in text
    status, text = ask(3_000_000, '{"max_tokens": 7000, "ignore_eos": true}')
    assert status == 200
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    assert outputs["finish_reason"] == ["deadline"]
    assert 0 < outputs["usage"][1] < 7000
    body = generate_body(picture, sampling_parameters='{"timeout_us": 1000}')
    status, text = post(f"{server.http_url}/v2/models/vlm/generate_stream", body)
    assert "UNAVAILABLE: deadline exceeded after" in text
