"""A request of OpenAI's as a call of the SDK's, and the SDK's answer as OpenAI's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tessera_client.messages import Answer, Delta, Usage
from tessera_gateway.errors import ApiError
from tessera_gateway.protocol import ChatRequest, JsonObject, JsonSchema, Message, Picture

SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "priority"),
)
FINISHED = ("stop", "length")  # OpenAI's words too
LEAST_LOGPROB = -9999.0  # what vLLM writes for minus infinity, which JSON has not


def sampling(request: ChatRequest, max_tokens: int | None) -> dict[str, Any]:
    """The options of :meth:`tessera_client.AsyncClient.chat`; what is None or absent is left to the server.

    ``max_tokens``, if any, counts where the request does not say and its answer is no label.
    """
    options: dict[str, Any] = {name: getattr(request, name) for name in SAME_NAME}
    asked = request.limit
    if asked is None and max_tokens is not None and not (request.tessera and request.tessera.choices):
        asked = max(max_tokens, request.min_tokens or 0)
    options["max_tokens"] = asked
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    if request.vllm_xargs:
        options["no_repeat_ngram_size"] = request.vllm_xargs.no_repeat_ngram_size
    if request.mm_processor_kwargs:
        options |= request.mm_processor_kwargs.model_dump()
    if isinstance(request.response_format, JsonObject):
        options["json_object"] = True
    if isinstance(request.response_format, JsonSchema):
        options["json_schema"] = request.response_format.json_schema.schema_
    if request.tessera:
        own = request.tessera
        options |= {"choices": own.choices, "regex": own.regex, "tile_policy": own.tile_policy}
    return {name: value for name, value in options.items() if value is not None}


def messages(request: ChatRequest, fetched: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The conversation as the SDK takes it; ``fetched`` has the bytes behind each http(s) URL."""
    return [_message(message, fetched) for message in request.messages]


def _message(message: Message, fetched: Mapping[str, bytes]) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if not isinstance(part, Picture):
            parts.append({"type": "text", "text": part.text})
            continue
        picture = part.image_url
        detail = {"detail": picture.detail} if picture.detail else {}
        if picture.url in fetched:
            parts.append({"type": "image", "image": fetched[picture.url], **detail})
        else:
            parts.append({"type": "image_url", "image_url": {"url": picture.url, **detail}})
    return {"role": role, "content": parts}


def urls(request: ChatRequest) -> list[tuple[str, str]]:
    """The pictures' addresses that are no ``data:`` URL, each with the path of its field."""
    return [
        (part.image_url.url, f"messages[{number}].content[{place}].image_url.url")
        for number, message in enumerate(request.messages)
        if not isinstance(message.content, str)
        for place, part in enumerate(message.content)
        if isinstance(part, Picture) and not part.image_url.url.startswith("data:")
    ]


class Completion:
    """What every part of one completion's answer has in common."""

    def __init__(self, asked: ChatRequest) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = asked.model
        # What became of the wish, as with OpenAI.
        self._tier = {"service_tier": "default"} if asked.service_tier else {}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer in one object."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": logprobs(answer.logprobs),
            "finish_reason": finish_reason(answer.finish_reason),
        }
        own = {"usage": usage(answer.usage), "tessera": extras(answer)}
        return self._object("chat.completion", [choice]) | own

    def chunk(self, delta: Mapping[str, str], finish: str | None = None, entries: Any = None) -> dict[str, Any]:
        """An object of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": logprobs(entries), "finish_reason": finish}
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last object of a stream for a client that wants the usage; it has no choice."""
        return self._object("chat.completion.chunk", [])

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
            **self._tier,
        }


def usage(used: Usage | None) -> dict[str, int] | None:
    if used is None:
        return None
    total = used.prompt_tokens + used.completion_tokens
    tokens = {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens}
    return tokens | {"total_tokens": total}


def extras(answer: Answer | Delta) -> dict[str, Any]:
    """The field ``tessera`` of an answer: milliseconds per stage, labels' scores, tokens of pictures."""
    return {
        "timings": answer.timings and {name: round(ms, 3) for name, ms in asdict(answer.timings).items()},
        "choices": answer.choices and [asdict(score) for score in answer.choices],
        "image_tokens": answer.usage and answer.usage.image_tokens,
    }


def finish_reason(reason: str) -> str:
    """The reason. Raises ApiError for an answer that was not finished."""
    if reason not in FINISHED:
        status = 504 if reason == "deadline" else 499
        words = "the time given to the request ran out" if reason == "deadline" else "the request was cancelled"
        raise ApiError(status, f"{words} before the answer was complete", code=reason)
    return reason


def logprobs(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """The server's entries ``{"text", "logprob", "top": [...]}`` of each token, as OpenAI writes them."""
    if not entries:
        return None
    content = [_token(entry) | {"top_logprobs": [_token(other) for other in entry["top"]]} for entry in entries]
    return {"content": content, "refusal": None}


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    text, logprob = entry["text"], entry["logprob"]
    # A part of a character has no text of its own, and its bytes are not known here.
    encoded = None if "\ufffd" in text else list(text.encode())
    known = logprob is not None and logprob > LEAST_LOGPROB
    return {"token": text, "logprob": logprob if known else LEAST_LOGPROB, "bytes": encoded}
