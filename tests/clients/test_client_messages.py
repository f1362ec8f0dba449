"""Requests and answers as the contract has them; what is wrong with them, or with the server, is an SDK error."""

import base64
import json
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport
from fakes.web_page import serving

from tessera_client import Client, contract
from tessera_client.messages import Cascade, LabelScore, Timings, Usage, chat_request
from tessera_wire.errors import InvalidRequest, ProtocolError


def test_chat_moves_pictures_out_of_the_messages_in_order() -> None:
    """And leaves what it does not know to the server."""
    url = "data:image/png;base64," + base64.b64encode(b"second").decode()
    others = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": b"third"}]
    fetched = {"type": "image_url", "image_url": {"url": "http://somewhere/a.jpg"}}
    request = chat_request(
        [{"role": "system", "content": "short"}, {"role": "user", "content": [{"type": "image"}, *others, fetched]}],
        images=[b"first"],
    )
    assert request.images == (b"first", b"second", b"third") and request.text is None
    assert json.loads(request.messages or "") == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "image"}] * 3 + [fetched]},
    ]


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
            ("drafted_tokens", np.array([7, 6], "<i4").tobytes()),
            ("timings", timings),
            ("logprobs", text(b'[{"token": 1}]')),
            ("choices", text(b'[{"label": "n\xc3\xa9", "logprob": -1, "probability": 0.4, "normalized": 0.6}]')),
            ("cascade", text(b'{"margin": 0.5, "escalated": true}')),
        ]
    )
    assert (last.text, last.finish_reason, last.usage) == ("né", "stop", Usage(9, 2, 4))
    assert last.usage is not None and last.usage.cached_tokens == 5
    assert (last.usage.drafted_tokens, last.usage.accepted_tokens) == (7, 6)
    assert last.timings == Timings(0, 1, 2, 3, 4, 5) and last.logprobs == [{"token": 1}]
    assert last.choices == (LabelScore("né", -1, 0.4, 0.6),) and last.cascade == Cascade(0.5, True)
    middle = contract.delta_from_raw(
        [("usage", bytes(12)), ("text_output", text(b"a"))]
        + [(name, text(b"")) for name in ("finish_reason", "logprobs", "choices", "cascade")]
    )
    assert (middle.usage, middle.timings, middle.logprobs, middle.choices, middle.cascade) == (None,) * 5


@pytest.mark.parametrize(
    ("read", "outputs"),
    [
        (contract.delta_from_raw, [("other", b"")]),
        (contract.delta_from_raw, [("text_output", b"\1\0")]),
        (contract.delta_from_raw, [("text_output", b""), ("logprobs", b"\3\0\0\0{{{")]),
        (contract.delta_from_raw, [("text_output", b""), ("choices", b"\3\0\0\0[1]")]),
        (contract.delta_from_raw, [("text_output", b""), ("choices", b'\x0e\0\0\0[{"label": ""}]')]),
        *((contract.plans_from_raw, outputs) for outputs in ([], [("PIXELS", b"")])),
        *(
            (contract.plans_from_raw, [("CUT", data)])
            for data in (b"", bytes(3), b"\1\0\0\0{", b"\1\0\0\0003", b"\4\0\0\0[{}]")
        ),
    ],
)
def test_outputs_of_another_model_are_a_protocol_error(read: Any, outputs: Any) -> None:
    with pytest.raises(ProtocolError):
        read(outputs)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.chat([]),
        lambda client: client.chat(["hello"]),
        lambda client: client.chat([{"role": "user", "content": [{"type": "image"}]}]),
        lambda client: client.ask(None, "q", stop=object()),
        lambda client: client.chat([{"role": "user", "content": 5}]),
        lambda client: client.chat(None),
        lambda client: client.chat([{"role": "user", "content": "\ud800"}]),
        lambda client: client.ask(None, "lone \udfff"),
        lambda client: client.ask(None, "q", tile_policy=5),
        lambda client: client.ask(None, "q", timeout="soon"),
        lambda client: client.ask(None, "q", timeout=float("nan")),
        lambda client: client.stream(None, "q", timeout="soon"),
        lambda client: list(client.ask_many([], concurrency=0)),
        lambda client: list(client.ask_many([], errors="retrun")),
        lambda client: list(client.ask_many(5)),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(call: Any) -> None:
    fake = FakeTransport()
    with pytest.raises(InvalidRequest):
        call(Client(transport=fake))
    assert not fake.requests


@pytest.mark.parametrize("url", [5, [], [5], "a:1,", "a:1,ftp://b", "http://[::1", "host:port", "a:99999", "ho st:1"])
def test_what_is_no_address_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequest, match="server address"):
        Client(url)


@pytest.mark.parametrize("page", [b"<html>It works!</html>", b"[1, 2]", b"{}", b"\xff\xfe", b"[" * 9999])
def test_another_web_server_is_a_protocol_error(page: bytes) -> None:
    with serving(lambda: (200, page)) as port, Client(f"http://127.0.0.1:{port}") as client:
        assert not client.ready()
        for call in (client.status, lambda: client.ask(None, "q"), lambda: client.stream(None, "q").answer()):
            with pytest.raises(ProtocolError):
                call()
