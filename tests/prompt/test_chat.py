"""Requests to turns: roles, parts, markers and their numbers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import InvalidRequest
from tessera.prompt.messages import IMAGE, Message, parse_chat

URL = {"type": "image_url", "image_url": {"url": "data:"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


SYSTEM = {"role": "system", "content": "An <image> here is text."}
NO = {"role": "assistant", "content": "No, not <image>."}
LOW = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
CODE = {"type": "text", "text": "<image src=...>, <image>"}


@pytest.mark.parametrize(
    ("text", "messages", "images", "sources", "low"),
    [
        ("Hello?", None, 0, (), ()),
        ("Compare them.", None, 2, (0, 1), (False, False)),
        ("First <image>, second <image>.", None, 2, (0, 1), (False, False)),
        (
            None,
            [SYSTEM, *user([{"type": "image"}]), NO, *user([URL]), *user([{"type": "image"}])],
            2,
            (0, "data:", 1),
            (),
        ),
        (
            None,
            [SYSTEM, *user([{"type": "text", "text": "<image> <image>?"}]), NO, *user("<image>?")],
            3,
            (0, 1, 2),
            (),
        ),
        (None, user([LOW, {"type": "image", "detail": "high"}]), 1, ("data:,", 0), (True, False)),
        (None, [*user("What is the tag <image> here?"), *user([{"type": "image"}, CODE])], 1, (0,), ()),
        (None, [*user("What is the tag <image> here?"), *user([URL, CODE])], 0, ("data:",), ()),
    ],
)
def test_images_are_taken_in_order(text: Any, messages: Any, images: int, sources: Any, low: Any) -> None:
    chat = parse_chat(text, messages, images)
    assert chat.sources == sources and chat.low == (low or (False,) * len(sources))
    if messages:
        assert [message.role for message in chat.messages] == [message["role"] for message in messages]


def test_where_images_stand_in_a_turn() -> None:
    """Beside an image part a marker is text."""
    assert parse_chat("Two.", None, 2).messages == (Message("user", (IMAGE, IMAGE, "Two.")),)
    assert parse_chat("A <image>.", None, 1).messages == (Message("user", "A <image>.", markers=True),)
    assert parse_chat("Hello?", None, 0).messages == (Message("user", "Hello?"),)
    beside = parse_chat(None, [*user("<image>"), *user([{"type": "image"}, CODE])], 1)
    assert not any(message.markers for message in beside.messages)


@pytest.mark.parametrize(
    ("text", "messages", "images", "word"),
    [
        (None, None, 0, "no text"),
        ("a", user("b"), 0, "both"),
        (None, [], 0, "at least one"),
        (None, "hello", 0, "list"),
        (None, ["hello"], 0, "message 0"),
        (None, [{"role": "tool", "content": "x"}], 0, "role"),
        (None, [{"role": ["user"], "content": "x"}], 0, "role"),
        (None, user(None), 0, "content"),
        (None, user(5), 0, "content"),
        (None, user([{"type": "audio"}]), 0, "part 0"),
        (None, user([{"type": "text"}]), 0, "text must be"),
        (None, user(["bare"]), 0, "part 0"),
        (None, user([{"type": "image", "url": "x"}]), 1, "image_url"),
        (None, user([{"type": "image_url"}]), 0, "url"),
        (
            None,
            user([{"type": "image_url", "image_url": {"url": "data:", "detail": "less"}}]),
            0,
            "detail must be one of",
        ),
        (None, user([{"type": "image", "detail": ["low"]}]), 1, "detail must be one of"),
        (None, [{"role": "assistant", "content": [{"type": "image"}]}], 1, "user turns"),
        (None, user("a") + user("b"), 1, "2 user turns"),
        ("bad \ud800 text", None, 0, "surrogate at character 4"),
        ("<image> and <image>", None, 1, "2 places for images but the request has 1 image;"),
        ("<image>", None, 2, "1 place for images but the request has 2 images;"),
        ("<image>", None, 0, "0 images"),
        # what looks like a place and is none
        (
            None,
            user([URL, {"type": "text", "text": "What?"}]),
            1,
            r"0 places for images but the request has 1 image \(not counted: 1 image part with a picture inside\);",
        ),
        (
            None,
            user([URL, {"type": "text", "text": "Like <image>?"}]),
            1,
            "picture inside, 1 <image> marker beside image parts or outside of user ",
        ),
        (
            None,
            [{"role": "system", "content": "<image>"}, *user("a"), *user("a")],
            2,
            r"has 2 images, no place for them \(not counted: 1 <image> marker beside image parts or outside of user",
        ),
        (
            None,
            [{"role": "assistant", "content": "<image>"}, *user("<image>")],
            2,
            r"1 place for images but the request has 2 images \(not counted: 1 <image> marker beside",
        ),
    ],
)
def test_wrong_requests_say_what_is_wrong(text: Any, messages: Any, images: int, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        parse_chat(text, messages, images)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["user", "text", "image"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "image_url", "url"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(JSON, st.integers(0, 3))
def test_any_json_is_a_chat_or_an_invalid_request(messages: Any, images: int) -> None:
    try:
        chat = parse_chat(None, messages, images)
    except InvalidRequest:
        return
    assert sorted(source for source in chat.sources if isinstance(source, int)) == list(range(images))
