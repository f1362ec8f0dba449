"""`tessera serve` and its gateway, and OpenAI's client against the real models."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import demo
import httpx
import openai
import pytest
from batch_files import answers, client_of, create, line, over, rows
from gateway_doubles import free_port, listening
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from server.toy_servers import ECHO, Launched, add_model, all_gone, wait_until

import scene
from tessera.launcher.guard import descendants
from tessera.launcher.process import Server
from tessera_client import Client
from tessera_client.tracing import STAGES
from tessera_gateway.app import create_app
from tessera_gateway.settings import Settings

pytestmark = pytest.mark.server

SOURCES = Path(__file__).resolve().parents[2] / "clients"
QUESTION = "Is there an exposed wire?"


def test_the_launcher_keeps_it_up_and_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_model(tmp_path / "models", "echo", ECHO, "TYPE_STRING")
    port = free_port()
    launched = Launched(tmp_path / "models", tmp_path / "log", "--openai-port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        assert f", openai {url}, models echo" in launched.ready_line
        servers = httpx.get(f"{url}/metrics/servers", timeout=10, trust_env=False).text
        assert "nv_inference_request_success" in servers
        # Without the model `vlm` the service is not ready for questions.
        assert httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 503
        (gateway,) = [pid for pid in launched.pids if "tessera_gateway" in " ".join(command(pid))]
        os.kill(gateway, signal.SIGKILL)
        assert launched.process.stderr is not None and launched.process.stdout is not None
        assert "the gateway ended: killed by signal 9" in launched.process.stderr.readline()
        assert "the gateway is ready again" in launched.process.stdout.readline()
        assert httpx.get(f"{url}/v1/models", timeout=10, trust_env=False).status_code == 200
        pids = descendants(launched.process.pid)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(10) == 0
        assert wait_until(lambda: all_gone(pids))
    finally:
        launched.process.kill()
        launched.process.communicate()


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture(scope="module")
def picture() -> bytes:
    return scene.encode_jpeg(scene.sample(7, "heldout"))


@pytest.fixture(scope="module")
def address(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ["NO_PROXY"] = "127.0.0.1"
    folder = str(tmp_path_factory.mktemp("batches"))
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
    with Client(server.grpc_url) as sdk:
        expected = sdk.ask(picture, QUESTION, max_tokens=8, logprobs=2)
    options: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 8}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and expected.text.strip()
    assert choice.finish_reason == expected.finish_reason
    assert expected.usage is not None and answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert choice.logprobs is not None and choice.logprobs.content is not None
    # The token that ended it is counted, but no part of the answer.
    ended = choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == answer.usage.completion_tokens - ended
    for entry, known in zip(choice.logprobs.content, expected.logprobs, strict=True):
        assert entry.token == known["text"] and abs(entry.logprob - known["logprob"]) < 1e-3
        assert [other.token for other in entry.top_logprobs] == [other["text"] for other in known["top"]]
    assert answer.tessera["image_tokens"] == expected.usage.image_tokens  # type: ignore[attr-defined]
    assert answer.tessera["timings"]["first_token"] > 0  # type: ignore[attr-defined]

    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_copy(update={"prompt_tokens_details": None}) == answer.usage.model_copy(
        update={"prompt_tokens_details": None}
    )


def test_many_at_once(address: str, picture: bytes) -> None:
    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.chat.completions.create(model="vlm", messages=messages(picture), max_tokens=4) for _ in range(16)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert len(set(asyncio.run(run()))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_holds_every_stage_in_its_time(server: Server, picture: bytes, stream: bool) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    asked = {"model": "vlm", "messages": messages(picture), "max_tokens": 8, "stream": stream}
    with listening(create_app(Settings(url=server.grpc_url), provider=provider)) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
        assert answer.status_code == 200
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    request, chat, *stages = (spans[name] for name in ("POST /v1/chat/completions", "chat vlm", *STAGES))
    times = [request.start_time, chat.start_time, *(span.start_time for span in stages)]
    assert times == sorted(times) and len(spans) == 2 + len(STAGES)  # type: ignore[type-var]
    ends = [*(span.end_time for span in stages), chat.end_time, request.end_time]
    assert ends == sorted(ends) and ends[:-3] == times[3:]  # type: ignore[type-var]
    assert chat.attributes is not None and chat.attributes["gen_ai.usage.output_tokens"]


def test_labels_tiles_and_text_alone(client: openai.OpenAI, picture: bytes) -> None:
    own = {"tessera": {"choices": ["yes", "no"], "tile_policy": {"max_tiles": 1}}}
    answer = client.chat.completions.create(model="vlm", messages=messages(picture), extra_body=own)
    scores = answer.tessera["choices"]  # type: ignore[attr-defined]
    assert [score["label"] for score in scores] == ["yes", "no"]
    assert answer.choices[0].message.content == max(scores, key=lambda score: score["probability"])["label"]
    alone: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = client.chat.completions.create(model="vlm", messages=alone, max_tokens=2)
    assert text.usage is not None and text.usage.completion_tokens <= 2


def test_answers_of_a_given_shape(client: openai.OpenAI, picture: bytes) -> None:
    class Finding(BaseModel):
        wire: bool
        sockets: Literal[0, 1, 2]

    options: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 60}
    answer = client.chat.completions.parse(**options, response_format=Finding)
    assert isinstance(answer.choices[0].message.parsed, Finding)
    matched = client.chat.completions.create(**options, extra_body={"tessera": {"regex": "[ab]{5}"}})
    assert re.fullmatch("[ab]{5}", matched.choices[0].message.content or "")


def test_a_response_is_what_a_chat_completion_is(client: openai.OpenAI, picture: bytes) -> None:
    chat = client.chat.completions.create(model="vlm", messages=messages(picture), max_tokens=4)
    (turn,) = messages(picture)
    url = turn["content"][0]["image_url"]["url"]
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
    asked: Any = {"model": "vlm", "input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    answer = client.responses.create(**asked)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.input_tokens_details.cached_tokens > 0  # the chat's
    with client.responses.stream(**asked) as stream:
        assert "".join(each.delta for each in stream if each.type == "response.output_text.delta") == answer.output_text


def test_what_a_prompt_found_cached_is_told(server: Server, client: openai.OpenAI) -> None:
    asked = messages(scene.encode_jpeg(scene.sample(4713, "heldout")))
    first, again = (client.chat.completions.create(model="vlm", messages=asked, max_tokens=2).usage for _ in range(2))
    assert first is not None and again is not None and first.prompt_tokens_details and again.prompt_tokens_details
    cached = again.prompt_tokens_details.cached_tokens
    assert (first.prompt_tokens_details.cached_tokens or 0) < 64  # of a picture it has not seen
    assert cached is not None and 64 <= cached < again.prompt_tokens
    with Client(server.http_url) as sdk:
        answer = sdk.chat(asked, max_tokens=2)
    assert answer.usage is not None and answer.usage.cached_tokens == cached


def test_several_answers_encode_a_picture_once(server: Server, client: openai.OpenAI) -> None:
    options: Any = {"model": "vlm", "messages": messages(scene.encode_jpeg(scene.sample(4711, "heldout")))}
    options |= {"max_tokens": 6, "temperature": 20, "seed": 3, "extra_body": {"ignore_eos": True}}
    before = pictures(server)
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
    assert wait_until(lambda: pictures(server) >= before + 2)  # the page is renewed four times a second
    assert pictures(server) == before + 2


def pictures(server: Server) -> float:
    """Whose rows were computed."""
    page = httpx.get(server.metrics_url, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("tessera_vision_pictures_total")]
    return sum(float(line.split()[-1]) for line in lines)


def test_an_answer_calls_a_function(client: openai.OpenAI, picture: bytes) -> None:
    class Note(BaseModel):
        room: Literal["kitchen", "bathroom"]
        wires: Literal[0, 1, 2]

    tool: Any = {"type": "function", "function": {"name": "note", "parameters": Note.model_json_schema()}}
    options: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 200, "tools": [tool]}
    for choice, reason in (({"type": "function", "function": {"name": "note"}}, "stop"), ("required", "tool_calls")):
        answer = client.chat.completions.create(**options, tool_choice=choice).choices[0]
        assert answer.finish_reason == reason and answer.message.tool_calls
        call: Any = answer.message.tool_calls[0]
        assert call.function.name == "note" and Note.model_validate_json(call.function.arguments)
    free = client.chat.completions.create(**options, extra_body={"logit_bias": {}}).choices[0]
    assert free.finish_reason in ("stop", "tool_calls", "length")
    matched = client.chat.completions.create(
        model="vlm", messages=options["messages"], extra_body={"guided_choice": ["(a)", "2.5"]}
    )
    assert matched.choices[0].message.content in ("(a)", "2.5")


def test_penalties_change_the_answer(client: openai.OpenAI, picture: bytes) -> None:
    options: Any = {"model": "vlm", "messages": messages(picture), "max_tokens": 24}
    plain = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    own = {"ignore_eos": True, "vllm_xargs": {"no_repeat_ngram_size": 1}, "repetition_penalty": 1.0, "priority": 1}
    other = client.chat.completions.create(**options, presence_penalty=0, frequency_penalty=0, extra_body=own)
    assert other.choices[0].message.content != plain.choices[0].message.content


def test_the_page_and_what_it_asks(address: str, picture: bytes) -> None:
    with httpx.Client(base_url=address, trust_env=False, timeout=30) as browser:
        assert "<title>" in browser.get("/").text
        cut = browser.post("/tessera/tiles", content=picture).json()
        assert cut["unit"] == "tiles" and "native" in cut["policies"] and cut["width"] > 0
        parts = sum(view["rows"] * view["columns"] for view in cut["views"])
        assert cut["tokens"] == parts * 64  # of the default checkpoint
        refusal = browser.post("/tessera/tiles", content=b"no picture")
        assert refusal.status_code == 400 and refusal.json()["error"]["type"] == "invalid_request_error"
        (about,) = browser.get("/tessera/status").json()["servers"]
        assert about["up"] and about["kv_blocks"]["total"] > 0


def test_what_the_server_refuses_is_named(client: openai.OpenAI, picture: bytes) -> None:
    for options, words in (
        ({"max_tokens": 100_000}, "exceed the context"),
        ({"temperature": -1}, "temperature is -1"),
        ({"extra_body": {"tessera": {"choices": ["yes"]}}}, "takes 2 to 64"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="vlm", messages=messages(picture), **options)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="image"):
        client.chat.completions.create(model="vlm", messages=messages(b"no picture"))


def test_a_client_that_leaves_stops_the_work(server: Server, client: openai.OpenAI, picture: bytes) -> None:
    before = cancelled(server)
    stream = client.chat.completions.create(
        model="vlm", messages=messages(picture), max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert wait_until(lambda: cancelled(server) == before + 1)


def cancelled(server: Server) -> float:
    page = httpx.get(server.metrics_url, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("tessera_requests_total{") and "cancelled" in line]
    return sum(float(line.split()[-1]) for line in lines)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_demos_last_line_works(address: str) -> None:
    line = demo.curl(int(address.rpartition(":")[2])).replace("localhost", "127.0.0.1")
    run = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=SOURCES.parent, timeout=60)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"].strip(), run


def test_readiness_and_the_servers_pages(address: str) -> None:
    assert httpx.get(f"{address}/health", timeout=10, trust_env=False).json() == {"ready": True}
    assert "tessera_kv_blocks_total" in httpx.get(f"{address}/metrics/servers", timeout=10, trust_env=False).text
    one = httpx.get(f"{address}/v1/models/vlm", trust_env=False).json()
    assert (one["id"], one["max_model_len"]) == ("vlm", 8192)  # of the default checkpoint
    assert httpx.get(f"{address}/v1/models", trust_env=False).json()["data"] == [one]


def test_a_batch_answers_as_a_question_does(client: openai.OpenAI, picture: bytes) -> None:
    asked = {"good": messages(picture), "cut": messages(picture[:200])}
    lines = [line(name, messages=value, max_tokens=4) for name, value in asked.items()]
    batch = over(client, create(client, *lines), 120)
    one = client.chat.completions.create(model="vlm", messages=asked["good"], max_tokens=4)
    assert answers(client, batch) == {"good": one.choices[0].message.content}
    (failed,) = rows(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("cut", 400)
