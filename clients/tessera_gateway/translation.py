"""A request of OpenAI's as a call of the SDK's, and the SDK's answer as OpenAI's."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tessera_client.messages import SAME_NAME, Answer, Delta, Usage
from tessera_gateway.errors import ApiError
from tessera_gateway.protocol import ChatRequest, Content, Message, Picture
from tessera_gateway.tools import calling, instructed, message, shape, written

FINISHED = ("stop", "length")  # OpenAI's words too
LEAST_LOGPROB = -9999.0  # what vLLM writes for minus infinity, which JSON has not


def sampling(request: ChatRequest, max_tokens: int | None) -> list[dict[str, Any]]:
    """The options of :meth:`tessera_client.AsyncClient.chat` for each of the answers; what is None or absent is left
    to the server. Each has a seed of its own, the one given and those after it.

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
        options |= request.vllm_xargs.model_dump(include={"no_repeat_ngram_size", "draft"})
    if request.prediction:
        options["draft"] = request.prediction.text
    if request.mm_processor_kwargs:
        options |= request.mm_processor_kwargs.model_dump()
    if request.tessera:
        options["tile_policy"] = request.tessera.tile_policy
    options |= shape(request)
    given = {name: value for name, value in options.items() if value is not None}
    if request.seed is None:
        return [given] * (request.n or 1)
    return [given | {"seed": _int64(request.seed, number)} for number in range(request.n or 1)]


def _int64(seed: int, more: int) -> int:
    """A sum that stays a seed if ``seed`` is one."""
    return seed + more if seed + more < 2**63 or seed >= 2**63 else seed + more - 2**64


def messages(request: ChatRequest, fetched: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The conversation as the SDK takes it; ``fetched`` has the bytes behind each http(s) URL."""
    turns: list[dict[str, Any]] = []
    for before, turn in zip([None, *request.messages], request.messages):
        said = _turn(turn, fetched)
        if before and before.role == turn.role == "tool":  # one turn, as templates have it
            turns[-1]["content"] += [{"type": "text", "text": "\n"}, *said["content"]]
        else:
            turns.append(said)
    return instructed(turns, calling(request))


def _turn(turn: Message, fetched: Mapping[str, bytes]) -> dict[str, Any]:
    """In one of the three roles that every template has."""
    role = {"developer": "system", "tool": "user"}.get(turn.role, turn.role)
    content = _content(turn.content or "", fetched)
    if turn.tool_calls:
        calls = written(turn.tool_calls)
        content = [*_parts(content), {"type": "text", "text": f"\n{calls}"}] if content else calls
    if turn.role == "tool":
        opening, closing = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
        content = [opening, *_parts(content), closing]
    return {"role": role, "content": content}


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: Content, fetched: Mapping[str, bytes]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if not isinstance(part, Picture):
            parts.append({"type": "text", "text": part.text})
            continue
        picture = part.image_url
        detail = {"detail": picture.detail} if picture.detail else {}
        if picture.url in fetched:
            parts.append({"type": "image", "image": fetched[picture.url], **detail})
        else:
            parts.append({"type": "image_url", "image_url": {"url": picture.url, **detail}})
    return parts


def urls(request: ChatRequest) -> list[tuple[str, str]]:
    """The pictures' addresses that are no ``data:`` URL, each with the path of its field."""
    return [
        (part.image_url.url, f"messages[{number}].content[{place}].image_url.url")
        for number, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if isinstance(part, Picture) and not part.image_url.url.startswith("data:")
    ]


class Completion:
    """The answer to a chat completion: one object, or events that are each a ``chat.completion.chunk``."""

    ending = b"data: [DONE]\n\n"

    def __init__(self, asked: ChatRequest) -> None:
        self.used: dict[str, Any] | None = None
        """The usage, when all is sent."""
        self._asked, self._calls = asked, calling(asked)
        self._fingerprint: str | None = None
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answers in one object."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        self.used = usage([answer.usage for answer in answers])
        self._fingerprint = answers[0].fingerprint or None
        return self._object("chat.completion", choices) | {"usage": self.used, "tessera": extras(answers[0])}

    async def events(self, coming: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """The answers as events, of deltas that each have their answer's number."""
        readers = [self._calls.reader() for _ in range(self._asked.n or 1)]
        endings: dict[int, Delta] = {}
        begun = False
        async for index, delta in coming:
            if not begun:
                begun, self._fingerprint = True, delta.fingerprint or None
                for each in range(len(readers)):
                    yield self._chunk(each, {"role": "assistant", "content": ""})
            reader = readers[index]
            reason = finish_reason(delta.finish_reason) if delta.finish_reason else None
            changes = reader.read(delta.text) + (reader.end() if reason else [])
            for change in changes or [{"content": ""}] * bool(delta.logprobs):
                yield self._chunk(index, change, entries=delta.logprobs)
            if reason is None:
                continue
            endings[index] = delta
            own: dict[str, Any] = {}
            if len(endings) == len(readers):
                self.used = usage([endings[place].usage for place in sorted(endings)])
                own = {"tessera": extras(endings[0])}
            apart = own and self._asked.stream_options and self._asked.stream_options.include_usage
            yield self._chunk(index, {}, self._calls.reason(reason, reader.called), **({} if apart else own))
            if apart:  # the last object for a client that wants the usage has no choice
                yield event(self._object("chat.completion.chunk", []) | {"usage": self.used} | own)

    def failed(self, error: ApiError) -> bytes:
        """The event of an error that comes after others."""
        return event(error.body)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        reader, reason = self._calls.reader(), finish_reason(answer.finish_reason)
        deltas = reader.read(answer.text) + reader.end()
        return {
            "index": index,
            "message": {"role": "assistant", **message(deltas)},
            "logprobs": logprobs(answer.logprobs),
            "finish_reason": self._calls.reason(reason, reader.called),
        }

    def _chunk(
        self, index: int, delta: Mapping[str, Any], finish: str | None = None, entries: Any = None, **own: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs(entries), "finish_reason": finish}
        return event({**self._object("chat.completion.chunk", [choice]), **own})

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            # What became of the wish, as with OpenAI.
            **({"service_tier": "default"} if self._asked.service_tier else {}),
        }


def event(content: dict[str, Any], kind: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {kind}\n".encode() if kind else b""
    return named + b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(answers: Sequence[Usage | None]) -> dict[str, Any] | None:
    """Of all answers to one prompt, which counts once."""
    used = [each for each in answers if each is not None]
    if not used:
        return None
    prompt, completion = used[0].prompt_tokens, sum(each.completion_tokens for each in used)
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    drafted, right = sum(each.drafted_tokens for each in used), sum(each.accepted_tokens for each in used)
    return tokens | {
        "prompt_tokens_details": {"cached_tokens": used[0].cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": drafted - right,
        },
    }


def extras(answer: Answer | Delta) -> dict[str, Any]:
    """The field ``tessera`` of an answer: milliseconds per stage, labels' scores, tokens of pictures, cascades."""
    return {
        "timings": answer.timings and {name: round(ms, 3) for name, ms in asdict(answer.timings).items()},
        "choices": answer.choices and [asdict(score) for score in answer.choices],
        "image_tokens": answer.usage and answer.usage.image_tokens,
        **(asdict(answer.cascade) if answer.cascade else {}),
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
