"""Both targets are asked the same, each in its own way, and their answers are counted; W6's questions come in turn."""

import json
import socket
from base64 import b64decode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import standin_server
import targets
from clients.fake_transport import TIMINGS
from gateway.gateway_doubles import gateway, listening
from targets import Asker, OpenAiAsker, TesseraAsker, fields, read_events
from workloads import PROMPT, QUESTIONS, WORKLOADS, Workload

from tessera_client import Delta, ServerError, Usage
from tessera_client.messages import chat_request


def deltas(workload: Workload) -> list[Any]:
    used = Usage(300, workload.tokens, 256)
    return [Delta("a"), Delta("b"), Delta("", "length", used, TIMINGS)]


@pytest.mark.parametrize("name", ["W1", "W2", "W4a"])
def test_a_request_is_the_workloads_and_its_answer_is_counted(name: str) -> None:
    workload = WORKLOADS[name]
    door = gateway(deltas(workload), deltas(replace(workload, tokens=3)))
    with (
        listening(door.app) as address,
        OpenAiAsker([address.removeprefix("http://")], workload, 7).connection() as ask,
    ):
        reply = ask(b"jpeg", workload, PROMPT)
        with pytest.raises(RuntimeError, match=f"asked for {workload.tokens} tokens"):
            ask(b"jpeg", workload, PROMPT)
        door.fake.script.append([ServerError("it broke")])
        with pytest.raises(RuntimeError, match="the server answers 500"):
            ask(b"jpeg", workload, PROMPT)
    assert (reply.tokens, reply.stages) == (workload.tokens, (1, 2, 3, 4, 5, 6))
    assert (reply.first is not None, reply.parts) == ((True, 2) if workload.streamed else (False, 1))
    request = door.fake.requests[0][0]
    sdk = chat_request([{"role": "user", "content": "q"}], **workload.sampling)
    assert (request.images, request.stream) == ((b"jpeg",), workload.streamed)
    assert request.sampling is not None and sdk.sampling is not None
    assert json.loads(request.sampling) == json.loads(sdk.sampling)


@contextmanager
def standin(make: type[Asker]):
    """The address of a stand-in for the target, in this process."""
    with ExitStack() as stack:
        if make is OpenAiAsker:
            yield stack.enter_context(listening(standin_server.openai_app)).removeprefix("http://")
        else:
            server, address = standin_server.serve(standin_server.Service())
            stack.callback(server.stop, None)
            yield address


@pytest.mark.parametrize("make", [TesseraAsker, OpenAiAsker])
def test_a_standin_answers_as_many_tokens_as_each_target_is_asked_for(make: type[Asker]) -> None:
    streamed = replace(WORKLOADS["W1"], always_streamed=True)
    with standin(make) as address, make([address], streamed, 7).connection() as ask:
        whole = ask(b"jpeg", WORKLOADS["W1"], PROMPT)
        reply = ask(b"jpeg", streamed, PROMPT)
    assert (whole.first, whole.tokens, whole.parts) == (None, 4, 1)
    assert reply.first is not None and (reply.tokens, reply.parts) == (4, 4)


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = WORKLOADS["W1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):  # an answer a connection
                taken, _ = listener.accept()
                with taken, taken.makefile("rb") as asked:
                    while (line := asked.readline()) != b"\r\n":
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split()[1])
                    asked.read(length)
                    body = json.dumps({"usage": {"completion_tokens": workload.tokens}}).encode()
                    taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setattr(targets, "IDLE_S", 0.0)
            with OpenAiAsker([address], workload, 7, model="m").connection() as ask:
                assert [ask(b"jpeg", workload, PROMPT).tokens for _ in range(2)] == [4, 4]
            served.result(10)


@pytest.mark.parametrize(
    ("deltas", "parts"),
    [
        ([{"role": "assistant", "content": ""}, {"content": ""}, {"content": "a"}, {}], 2),  # vLLM; a token has no text
        ([{"role": "assistant", "content": ""}, {"role": None, "content": "a"}, {"content": None}], 1),  # SGLang
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], 2),  # LMDeploy
        ([{"role": "assistant"}, {}], 0),
    ],
)
def test_parts_of_a_stream_are_those_of_tokens(deltas: list[dict[str, Any]], parts: int) -> None:
    lines = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [], "usage": {"completion_tokens": 2}}]
    events: Any = [*(f"data: {json.dumps(line)}\n".encode() for line in lines), b"\n", b"data: [DONE]\n"]
    first, counted, last = read_events(events)
    assert (first is not None, counted, last["usage"]) == (parts > 0, parts, {"completion_tokens": 2})


class Noting(Asker):
    """Knows what it was asked."""

    @contextmanager
    def connection(self):
        asked: list[tuple[bytes, str]] = []

        def ask(picture: bytes, workload: Workload, prompt: str) -> Any:
            asked.append((picture, prompt))
            return asked

        yield ask


def test_a_pictures_four_questions_are_asked_one_after_the_other() -> None:
    four = replace(WORKLOADS["W6"], width=64, height=48)
    with Noting([], four, 7).prepare(0, 12) as ask:
        for _ in range(12):
            asked: Any = ask()
    assert [prompt for _, prompt in asked] == list(QUESTIONS) * 3
    assert set(Counter(picture for picture, _ in asked).values()) == {4} and asked[0][0] == asked[3][0]


@pytest.mark.parametrize(("name", "order"), [("W6", ["image_url", "text"]), ("W6.text_first", ["text", "image_url"])])
def test_the_prompt_stands_where_the_workload_has_it(name: str, order: list[str]) -> None:
    request = fields(WORKLOADS[name], b"jpeg", "the question")
    parts = request["messages"][0]["content"]
    assert [part["type"] for part in parts] == order
    by_type = {part["type"]: part for part in parts}
    assert by_type["text"]["text"] == "the question"
    assert b64decode(by_type["image_url"]["image_url"]["url"].partition(",")[2]) == b"jpeg"
