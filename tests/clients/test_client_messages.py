"""Requests are built as the contract has them, whatever form the pictures come in."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.settings.stages import Limits
from tessera_client import contract
from tessera_client.messages import LabelScore, Timings, Usage, chat_request, question_request, sampling
from tessera_client.pictures import LARGEST_REQUEST, encode_image
from tessera_wire.errors import InvalidRequest, ProtocolError


def test_pictures_from_path_bytes_file_and_data_url(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"jpeg")
    url = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()
    for image in (path, str(path), b"jpeg", bytearray(b"jpeg"), io.BytesIO(b"jpeg"), url):
        assert encode_image(image) == b"jpeg"
    assert question_request([path, b"png"], "q").images == (b"jpeg", b"png")
    assert question_request(None, "q").images == ()


def test_an_array_becomes_a_lossless_picture() -> None:
    cv2 = pytest.importorskip("cv2")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    decoded = cv2.imdecode(np.frombuffer(encode_image(pixels), np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    assert np.array_equal(decoded, pixels)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16B", "I;16L"])
@pytest.mark.parametrize("value", [0, 200, 300, 60000, 65535])
def test_whole_numbers_of_pillow_arrive_as_they_are(mode: str, value: int) -> None:
    """None is clipped at 255, as Pillow's conversion to 8 bits would; what they mean is the server's to say."""
    pillow = pytest.importorskip("PIL.Image")
    cv2 = pytest.importorskip("cv2")
    png = encode_image(pillow.new("I", (4, 3), value) if mode == "I" else pillow.new(mode, (4, 3), value))
    samples = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED)
    assert samples.dtype == np.uint16 and samples.shape == (3, 4) and (samples == value).all()


@pytest.mark.parametrize("value", [-1, 65536, 1 << 24])
def test_whole_numbers_beyond_16_bits_are_refused(value: int) -> None:
    image = pytest.importorskip("PIL.Image").new("I", (4, 3), value)
    with pytest.raises(InvalidRequest, match=f"mode 'I' that holds {value}..{value} has no range of brightness"):
        encode_image(image)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((4, 4), np.uint8), r"uint8 \[4, 4\]"),
        (np.zeros((4, 4, 3), np.float32), "float32"),
        (b"", "zero bytes"),
        ("nowhere.jpg", "nowhere.jpg"),
        ("data:image/png,xx", "base64"),
        ("data:image/png;base64,@@", "invalid base64"),
        (io.StringIO("text"), "binary mode"),
        (17, "cannot be a int"),
    ],
)
def test_what_is_no_picture_is_refused(image: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        encode_image(image)


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


def test_a_path_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with open(tmp_path / "large.jpg", "wb") as file:
        file.truncate(LARGEST_REQUEST + 1)
    (tmp_path / "small.jpg").write_bytes(b"jpeg")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.jpg"))
        for name, words in (
            ("pipe.jpg", "is a pipe, not a picture's file"),
            ("socket.jpg", "is a socket"),
            ("", "is a folder"),
            ("large.jpg", f"has {LARGEST_REQUEST + 1} bytes; a request may have {LARGEST_REQUEST}"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                encode_image(tmp_path / name)
    with pytest.raises(InvalidRequest, match="of which the pictures before it leave 3"):
        chat_request([{"role": "user", "content": "?"}], [bytes(LARGEST_REQUEST - 3), tmp_path / "small.jpg"])


def test_the_limit_of_a_request_is_the_servers() -> None:
    assert Limits().max_request_bytes == LARGEST_REQUEST
