"""OpenAI's own client against the gateway over a real port; the servers behind it play a script."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from clients.fake_transport import final
from gateway_doubles import HELLO

from tessera_client import Delta, Unavailable


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "vlm", "messages": HELLO, **options})


def test_streamed_by_its_helper(client: openai.OpenAI, play: Any) -> None:
    play([Delta("ye"), final("s")])
    with client.chat.completions.stream(model="vlm", messages=HELLO) as stream:  # type: ignore[arg-type]
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "yes"
    assert [delta for delta in deltas if delta] == ["ye", "s"]


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.OpenAI, play: Any) -> None:
    play([final("two")], [final("yes")], [final("yes")])
    first = ask(client).choices[0].message
    for turn in (first, first.model_dump()):  # the second holds a null for each field of OpenAI's
        turns = [*HELLO, turn, {"role": "user", "content": "sure?"}]
        assert ask(client, messages=turns).choices[0].message.content == "yes"


def test_errors_are_its_own_classes(client: openai.OpenAI, play: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="functions is not supported by this server") as refused:
        ask(client, functions=[])
    assert refused.value.param == "functions" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        ask(client, model="gpt-4o")
    play([Unavailable("512 requests are in flight")])
    with pytest.raises(openai.RateLimitError):
        ask(client)
    play([Delta("a"), Unavailable("the server is stopping")])
    with pytest.raises(openai.APIError, match="stopping"):
        list(ask(client, stream=True))
