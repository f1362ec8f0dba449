"""Requests to turns: roles, parts, markers and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import InvalidRequest
from tessera.prompt.messages import IMAGE, Message, parse_chat


def test_text_alone_is_one_user_turn() -> None:
    chat = parse_chat("Hello?", None, 0)
    assert chat.messages == (Message("user", "Hello?"),)
    assert chat.sources == ()


def test_images_without_places_stand_in_front() -> None:
    chat = parse_chat("Compare them.", None, 2)
    assert chat.messages == (Message("user", (IMAGE, IMAGE, "Compare them.")),)
    assert chat.sources == (0, 1)


def test_markers_stay_where_they_are() -> None:
    chat = parse_chat("First <image>, second <image>.", None, 2)
    assert chat.messages == (Message("user", "First <image>, second <image>.", markers=True),)
    assert chat.sources == (0, 1)


def test_parts_and_urls_are_taken_in_order() -> None:
    url = "data:image/jpeg;base64,AAAA"
    messages = [
        {"role": "system", "content": "An <image> here is text."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Like this?"}]},
        {"role": "assistant", "content": "No, not <image>."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    chat = parse_chat(None, messages, 2)
    assert chat.sources == (0, url, 1) and chat.low == (False, False, False)
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "user"]


def test_each_image_part_says_its_detail() -> None:
    parts = [{"type": "image"}, {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}]
    chat = parse_chat(None, user([*parts, {"type": "image", "detail": "high"}, {"type": "image", "detail": "low"}]), 3)
    assert chat.low == (False, True, False, True)
    assert parse_chat("<image>", None, 1).low == parse_chat("in front", None, 1).low == (False,)


def test_markers_of_several_turns_are_taken_in_order() -> None:
    messages = [
        {"role": "system", "content": "An <image> here is text."},
        {"role": "user", "content": [{"type": "text", "text": "Like <image> and <image>?"}]},
        {"role": "assistant", "content": "No, not <image>."},
        {"role": "user", "content": "And <image>?"},
    ]
    chat = parse_chat(None, messages, 3)
    assert chat.sources == (0, 1, 2)
    assert [message.markers for message in chat.messages] == [False, True, False, True]


@pytest.mark.parametrize("picture", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "data:,"}}])
def test_beside_image_parts_a_marker_is_text(picture: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "What does the tag <image> mean in this code?"},
        {"role": "user", "content": [picture, {"type": "text", "text": "<image src=...>, <image>"}]},
    ]
    chat = parse_chat(None, messages, int(picture["type"] == "image"))
    assert len(chat.sources) == 1
    assert not any(message.markers for message in chat.messages)


URL = {"type": "image_url", "image_url": {"url": "data:"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


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
