"""OpenAI's own client against the gateway over a real port; the servers behind it play a script."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import openai
import pytest
from clients.fake_transport import Hang, final
from gateway_doubles import HELLO, Asked
from pydantic import BaseModel

from tessera_client import Delta, Unavailable

TOKEN = {"token_id": 5, "text": "yes", "logprob": -0.5, "top": [{"token_id": 6, "text": "no", "logprob": -2.0}]}
PICTURE = "data:image/jpeg;base64," + base64.b64encode(b"jpeg").decode()


def ask(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="vlm", messages=HELLO, **options)


def test_whole(client: openai.OpenAI, play: Any, door: tuple[Asked, str]) -> None:
    play([replace(final("yes"), logprobs=[TOKEN])])
    part = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}}
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [part, {"type": "text", "text": "a door?"}]},
    ]
    answer = client.chat.completions.create(
        model="vlm",
        messages=messages,
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        extra_body={"top_k": 1, "repetition_penalty": 1.05, "tessera": {"tile_policy": "reference"}},
    )
    assert answer.choices[0].message.content == "yes" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens == 12
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "no"
    assert answer.tessera["timings"]["vision"] == 3  # type: ignore[attr-defined]
    assert door[0].fake.requests[0][0].images == (b"jpeg",)


def test_streamed(client: openai.OpenAI, play: Any) -> None:
    play([Delta("ye", logprobs=[TOKEN]), final("s")])
    chunks = list(ask(client, stream=True, logprobs=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "yes" and chunks[-1].usage.completion_tokens == 2
    assert any(chunk.choices[0].logprobs for chunk in chunks if chunk.choices)


def test_streamed_by_its_helper(client: openai.OpenAI, play: Any) -> None:
    play([Delta("ye"), final("s")])
    with client.chat.completions.stream(model="vlm", messages=HELLO) as stream:  # type: ignore[arg-type]
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "yes"
    assert [delta for delta in deltas if delta] == ["ye", "s"]


class Room(BaseModel):
    sockets: int


def test_structured(client: openai.OpenAI, play: Any, door: tuple[Asked, str]) -> None:
    play([final('{"sockets": 2}')])
    answer = client.chat.completions.parse(model="vlm", messages=HELLO, response_format=Room)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == Room(sockets=2)
    assert '"json_schema": {"properties": {"sockets"' in (door[0].fake.requests[0][0].sampling or "")


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.OpenAI, play: Any) -> None:
    play([final("two")], [final("yes")], [final("yes")])
    first = ask(client).choices[0].message
    for turn in (first, first.model_dump()):  # the second holds a null for each field of OpenAI's
        messages: Any = [*HELLO, turn, {"role": "user", "content": "sure?"}]
        assert client.chat.completions.create(model="vlm", messages=messages).choices[0].message.content == "yes"


def test_errors_are_its_own_classes(client: openai.OpenAI, play: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="functions is not supported by this server") as refused:
        ask(client, functions=[])
    assert refused.value.param == "functions" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        client.chat.completions.create(model="gpt-4o", messages=HELLO)  # type: ignore[arg-type]
    play([Unavailable("512 requests are in flight")])
    with pytest.raises(openai.RateLimitError):
        ask(client)
    play([Delta("a"), Unavailable("the server is stopping")])
    with pytest.raises(openai.APIError, match="stopping"):
        list(ask(client, stream=True))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["vlm"]
    assert client.models.retrieve("vlm").owned_by == "tessera"


def test_leaving_a_stream_early_cancels_it(client: openai.OpenAI, play: Any, door: tuple[Asked, str]) -> None:
    play([Delta("a"), Hang()])
    stream = ask(client, stream=True)
    texts = (chunk.choices[0].delta.content for chunk in stream)
    assert next(text for text in texts if text) == "a"
    stream.close()
    client.close()

    async def told() -> None:
        while not door[0].fake.cancelled:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(told(), 10))


def test_asyncio(door: tuple[Asked, str], play: Any) -> None:
    async def run() -> None:
        play(*[[Delta("ye"), final("s")] for _ in range(8)])
        async with openai.AsyncOpenAI(base_url=f"{door[1]}/v1", api_key="none") as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(7)))
            assert [answer.choices[0].message.content for answer in answers] == ["yes"] * 7
            chunks = [chunk async for chunk in await ask(client, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"

    asyncio.run(run())
