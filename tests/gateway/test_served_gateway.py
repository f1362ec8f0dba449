"""`tessera serve` and its gateway, and OpenAI's client against the real models; one that is killed."""

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import demo
import httpx
import openai
import pytest
from bench import poison
from gateway_doubles import answers, client_of, create, free_port, line, listening, over, rows, started, until
from pydantic import BaseModel
from server.http_door import read, total
from server.toy_servers import ECHO, Launched, add_model, all_gone, wait_until
from test_connections import Line, question

import scene
from tessera.launcher.guard import descendants
from tessera.launcher.process import Server, command_line
from tessera_client import Client
from tessera_gateway.app import create_app
from tessera_gateway.settings import Settings

pytestmark = pytest.mark.server

SOURCES = Path(__file__).resolve().parents[2] / "clients"
QUESTION = "Is there an exposed wire?"


def test_the_launcher_starts_it_and_takes_it_along(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "echo", ECHO, "TYPE_STRING")
    port = free_port()
    with Launched(tmp_path / "models", tmp_path / "log", "--openai-port", str(port)) as launched:
        url = f"http://127.0.0.1:{port}"
        assert f", openai {url}, models echo" in launched.ready_line
        servers = httpx.get(f"{url}/metrics/servers", timeout=10, trust_env=False).text
        assert "nv_inference_request_success" in servers
        # Without the model `vlm` the service is not ready for questions.
        assert httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 503
        pids = descendants(launched.process.pid)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(10) == 0
        assert wait_until(lambda: all_gone(pids))


@pytest.fixture(scope="module")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


@pytest.fixture(scope="module")
def address(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("batches")
    with listening(create_app(Settings(server.grpc_url, (server.metrics_url,), batch_folder=folder))) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as client:
        yield client


def messages(picture: bytes, question: str = QUESTION) -> Any:
    url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def test_the_answer_is_the_sdks(server: Server, client: openai.OpenAI, picture: bytes) -> None:
    """Whole, as events, and as a response."""
    with Client(server.grpc_url) as sdk:
        expected = sdk.ask(picture, QUESTION, max_tokens=8, logprobs=2)
    asked: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 8}
    answer: Any = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,), used = answer.choices, expected.usage
    assert used is not None and expected.text.strip()
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (used.prompt_tokens, used.completion_tokens)
    # The token that ended it is counted, but no part of the answer.
    assert len(choice.logprobs.content) == used.completion_tokens - (choice.finish_reason == "stop")
    for entry, known in zip(choice.logprobs.content, expected.logprobs, strict=True):
        assert entry.token == known["text"] and abs(entry.logprob - known["logprob"]) < 1e-3
        assert [other.token for other in entry.top_logprobs] == [other["text"] for other in known["top"]]
    assert answer.tessera["image_tokens"] == used.image_tokens and answer.tessera["timings"]["first_token"] > 0
    chunks: Any = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    without = {"prompt_tokens_details": None}
    assert chunks[-1].usage.model_copy(update=without) == answer.usage.model_copy(update=without)
    url = asked["messages"][0]["content"][0]["image_url"]["url"]
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
    told = client.responses.create(model="vlm", input=[{"role": "user", "content": parts}], max_output_tokens=8)
    assert told.output_text == expected.text and told.usage is not None
    assert 64 <= told.usage.input_tokens_details.cached_tokens < told.usage.input_tokens == used.prompt_tokens


def test_labels_tiles_shapes_and_text_alone(client: openai.OpenAI, picture: bytes) -> None:
    class Finding(BaseModel):
        wire: bool
        sockets: Literal[0, 1, 2]

    own: Any = {"tessera": {"choices": ["yes", "no"], "tile_policy": {"max_tiles": 1}}}
    answer = client.chat.completions.create(model="vlm", messages=messages(picture), extra_body=own)
    scores = answer.tessera["choices"]  # type: ignore[attr-defined]
    assert [score["label"] for score in scores] == ["yes", "no"]
    assert answer.choices[0].message.content == max(scores, key=lambda score: score["probability"])["label"]
    asked: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 60}
    parsed = client.chat.completions.parse(**asked, response_format=Finding)
    assert isinstance(parsed.choices[0].message.parsed, Finding)
    own["tessera"]["tile_policy"] = {"cascade": {"margin": "inf"}}
    cut = client.chat.completions.create(model="vlm", messages=messages(picture), extra_body=own)
    assert cut.tessera["escalated"] and cut.tessera["margin"] > 0  # type: ignore[attr-defined]
    assert cut.tessera["image_tokens"] > answer.tessera["image_tokens"]  # type: ignore[attr-defined]
    tool: Any = {"type": "function", "function": {"name": "note", "parameters": Finding.model_json_schema()}}
    called = client.chat.completions.create(**asked, tools=[tool], tool_choice="required").choices[0]
    call: Any = (called.message.tool_calls or [None])[0]
    assert called.finish_reason == "tool_calls" and Finding.model_validate_json(call.function.arguments)
    told = client.chat.completions.create(**asked, extra_body={"guided_choice": ["(a)", "2.5"]})
    assert told.choices[0].message.content in ("(a)", "2.5")
    alone: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    brief = client.chat.completions.create(model="vlm", messages=alone, max_tokens=2)
    assert brief.usage is not None and brief.usage.completion_tokens <= 2


def test_several_answers_encode_a_picture_once(server: Server, client: openai.OpenAI) -> None:
    def encoded() -> float:
        return total(read(server.metrics_url), "tessera_vision_pictures_total")

    options: Any = {"model": "vlm", "messages": messages(scene.encode_jpeg(scene.sample(4711, "heldout")))}
    options |= {"max_tokens": 6, "temperature": 20, "seed": 3, "extra_body": {"ignore_eos": True}}
    before = encoded()
    several = client.chat.completions.create(**options, n=4)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) > 1 and several.usage is not None and several.usage.completion_tokens == 24
    one = client.chat.completions.create(**options | {"seed": 5})
    assert one.choices[0].message.content == texts[2]
    assert one.usage is not None and one.usage.prompt_tokens == several.usage.prompt_tokens
    heard = [""] * 4
    for chunk in client.chat.completions.create(**options, n=4, stream=True):
        heard[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert heard == texts
    other = messages(scene.encode_jpeg(scene.sample(4712, "heldout")))
    client.chat.completions.create(model="vlm", messages=other, max_tokens=1)
    assert wait_until(lambda: encoded() >= before + 2)  # the page is renewed four times a second
    assert encoded() == before + 2


def test_what_the_server_refuses_is_named(client: openai.OpenAI, picture: bytes) -> None:
    for options, words in (
        ({"max_tokens": 100_000}, "exceed the context"),
        ({"temperature": -1}, "temperature is -1"),
        ({"extra_body": {"tessera": {"choices": ["yes"]}}}, "takes 2 to 64"),
        ({"messages": messages(b"no picture")}, "image"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**{"model": "vlm", "messages": messages(picture), **options})  # type: ignore[call-overload]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_demos_last_line_works(address: str) -> None:
    line = demo.curl(int(address.rpartition(":")[2])).replace("localhost", "127.0.0.1")
    run = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=SOURCES.parent, timeout=60)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"].strip(), run


def test_readiness_and_the_servers_pages(address: str, picture: bytes) -> None:
    """And what the page asks."""
    with httpx.Client(base_url=address, trust_env=False, timeout=30) as browser:
        assert browser.get("/health").json() == {"ready": True}
        assert "tessera_kv_blocks_total" in browser.get("/metrics/servers").text
        one = browser.get("/v1/models/vlm").json()
        assert (one["id"], one["max_model_len"]) == ("vlm", 8192)  # of the default checkpoint
        assert browser.get("/v1/models").json()["data"] == [one]
        cut = browser.post("/tessera/tiles", content=picture).json()
        assert cut["unit"] == "tiles" and "native" in cut["policies"] and cut["width"] > 0
        parts = sum(view["rows"] * view["columns"] for view in cut["views"])
        assert cut["tokens"] == parts * 64  # of the default checkpoint
        refusal = browser.post("/tessera/tiles", content=b"no picture")
        assert refusal.status_code == 400 and refusal.json()["error"]["type"] == "invalid_request_error"
        (about,) = browser.get("/tessera/status").json()["servers"]
        assert about["up"] and about["kv_blocks"]["total"] > 0


def test_a_batch_answers_as_a_question_does(client: openai.OpenAI, picture: bytes) -> None:
    asked = {"good": messages(picture), "cut": messages(picture[:200])}
    lines = [line(name, messages=value, max_tokens=4) for name, value in asked.items()]
    batch = over(client, create(client, *lines), 120)
    one = client.chat.completions.create(model="vlm", messages=asked["good"], max_tokens=4)
    assert answers(client, batch) == {"good": one.choices[0].message.content}
    (failed,) = rows(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("cut", 400)


LONG_ANSWERS = 40


def wait_for(server: Server, in_flight: int, seconds: float) -> None:
    until(lambda: total(read(server.metrics_url), "tessera_requests_in_flight") == in_flight, seconds)


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["one process", "parent of two workers", "workers"])
def test_its_work_ends_with_it(server: Server, victim: str) -> None:
    wait_for(server, 0, 60)
    workers = "1" if victim == "one process" else "2"
    with ExitStack() as lines, started("--workers", workers, server=server.grpc_url) as (process, url):
        for number in range(LONG_ANSWERS):
            line = lines.enter_context(closing(Line(url)))  # which reads nothing of its answer
            line.send(question(max_tokens=7000, ignore_eos=True, stream=number % 2 == 0))
        wait_for(server, LONG_ANSWERS, 60)
        victims = [process.pid]
        if victim == "workers":
            victims = [pid for pid in descendants(process.pid) if "spawn_main" in " ".join(command_line(pid))]
            assert len(victims) == 2
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for(server, 0, 5)
    with Client(server.grpc_url) as client:
        assert client.ask(None, "Hello", max_tokens=2, timeout=20).attempts == 1


@pytest.mark.clients
def test_odd_files_change_nothing_for_the_good_ones() -> None:
    odd = poison.odd_files(50)
    with poison.served() as (address, health):
        result = poison.run(address, health, poison.good_requests(950), odd)
    assert result.fine, result
    assert result.odd.total() == 50 and result.odd["200"] and result.odd["400 invalid_request"]
    assert result.kinds > 20
