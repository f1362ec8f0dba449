"""Requests and answers as the contract has them; what is wrong with them, or with the server, is an SDK error."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport
from fakes.web_page import serving

from tessera_client import AsyncClient, Client, contract
from tessera_client.messages import LabelScore, Timings, Usage, chat_request, question_request, sampling
from tessera_wire.errors import InvalidRequest, ProtocolError


def test_chat_moves_pictures_out_of_the_messages_in_order() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"second").decode()
    request = chat_request(
        [
            {"role": "system", "content": "short"},
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "image", "image": b"third"},
                    {"type": "text", "text": "which?"},
                ],
            },
        ],
        images=[b"first"],
        max_tokens=3,
    )
    assert request.images == (b"first", b"second", b"third") and request.text is None
    assert json.loads(request.messages or "") == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "image"}] * 3 + [{"type": "text", "text": "which?"}]},
    ]


def test_chat_leaves_what_it_does_not_know_to_the_server() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://somewhere/a.jpg"}}
    request = chat_request([{"role": "user", "content": [part]}])
    assert json.loads(request.messages or "")[0]["content"] == [part]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        (["hello"], "role and content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "more image parts"),
    ],
)
def test_broken_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        chat_request(messages)


def test_sampling_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        question_request(None, "q", stop=object())
    assert question_request(None, "q", max_tokens=None).sampling is None


def test_outputs_become_a_delta() -> None:
    usage = np.array([9, 2, 4], "<i4").tobytes()
    timings = np.arange(6, dtype="<f4").tobytes()

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(4, "little") + value

    last = contract.delta_from_raw(
        [
            ("text_output", text("né".encode())),
            ("finish_reason", text(b"stop")),
            ("usage", usage),
            ("cached_tokens", np.array([5], "<i4").tobytes()),
            ("timings", timings),
            ("logprobs", text(b'[{"token": 1}]')),
            ("choices", text(b'[{"label": "n\xc3\xa9", "logprob": -1, "probability": 0.4, "normalized": 0.6}]')),
        ]
    )
    assert (last.text, last.finish_reason, last.usage) == ("né", "stop", Usage(9, 2, 4))
    assert last.usage is not None and last.usage.cached_tokens == 5
    assert last.timings == Timings(0, 1, 2, 3, 4, 5) and last.logprobs == [{"token": 1}]
    assert last.choices == (LabelScore("né", -1, 0.4, 0.6),)
    middle = contract.delta_from_raw(
        [("usage", bytes(12)), ("text_output", text(b"a"))]
        + [(name, text(b"")) for name in ("finish_reason", "logprobs", "choices")]
    )
    assert (middle.usage, middle.timings, middle.logprobs, middle.choices) == (None, None, None, None)


@pytest.mark.parametrize(
    "outputs",
    [
        [("other", b"")],
        [("text_output", b"\1\0")],
        [("text_output", b""), ("logprobs", b"\3\0\0\0{{{")],
        [("text_output", b""), ("choices", b"\3\0\0\0[1]")],
        [("text_output", b""), ("choices", b'\x0e\0\0\0[{"label": ""}]')],
    ],
)
def test_outputs_of_another_model_are_a_protocol_error(outputs: Any) -> None:
    with pytest.raises(ProtocolError):
        contract.delta_from_raw(outputs)


def test_a_tile_policy_may_be_a_name():
    assert json.loads(sampling({"tile_policy": "native"})) == {"tile_policy": {"name": "native"}}
    whole = json.loads(sampling({"tile_policy": "budget", "thumbnail": "never"}))
    assert whole == {"tile_policy": {"name": "budget", "thumbnail": "never"}}


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [("PIXELS", b"")],
        *([("CUT", data)] for data in (b"", bytes(3), b"\1\0\0\0{", b"\1\0\0\0003", b"\4\0\0\0[{}]")),
    ],
)
def test_what_is_no_plan_is_refused(outputs: list[tuple[str, bytes]]) -> None:
    with pytest.raises(ProtocolError, match="CUT"):
        contract.plans_from_raw(outputs)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.chat([{"role": "user", "content": None}]),
        lambda client: client.chat([{"role": "user", "content": 5}]),
        lambda client: client.chat(None),
        lambda client: client.chat([{"role": "user", "content": [{"type": "image"}]}], 17),
        lambda client: client.chat([{"role": "user", "content": "\ud800"}]),
        lambda client: client.ask(None, "lone \udfff"),
        lambda client: client.ask(None, "q", stop=["\ud800"]),
        lambda client: client.ask(None, "q", tile_policy=5),
        lambda client: client.ask(None, "q", timeout="soon"),
        lambda client: client.ask(None, "q", timeout=float("nan")),
        lambda client: client.ask(None, "q", timeout=float("inf")),
        lambda client: client.stream(None, "q", timeout="soon"),
        lambda client: list(client.ask_many([], concurrency=0)),
        lambda client: list(client.ask_many([], concurrency="many")),
        lambda client: list(client.ask_many([], errors="retrun")),
        lambda client: list(client.ask_many(5)),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(call: Any) -> None:
    fake = FakeTransport()
    with pytest.raises(InvalidRequest):
        call(Client(transport=fake))
    assert not fake.requests


@pytest.mark.parametrize(
    "url", [5, None, [], [5], "", "a:1,", "a:1,ftp://b", "http://[::1", "host:port", "a:99999", b"host:1", "ho st:1"]
)
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_what_is_no_address_is_refused(make: Any, url: Any) -> None:
    with pytest.raises(InvalidRequest, match="server address"):
        make(url)


@pytest.fixture(params=[b"<html>It works!</html>", b"[1, 2]", b'"text"', b"{}", b"\xff\xfe", b"[" * 9999])
def other_web_server(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(lambda: (200, request.param)) as port:
        yield f"http://127.0.0.1:{port}"


def test_another_web_server_is_a_protocol_error(other_web_server: str) -> None:
    with Client(other_web_server) as client:
        assert not client.ready()
        for call in (client.status, lambda: client.ask(None, "q"), lambda: client.stream(None, "q").answer()):
            with pytest.raises(ProtocolError):
                call()

    async def run() -> None:
        async with AsyncClient(other_web_server) as client:
            assert not await client.ready()
            with pytest.raises(ProtocolError):
                await client.status()

    asyncio.run(run())
