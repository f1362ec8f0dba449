"""What travels between a client and the server, as plain data: requests, pictures, answers.

Nothing in this file knows a transport. All types are frozen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera_client.pictures import Image, add_image, encode_images, from_data_url
from tessera_wire.errors import InvalidRequest

SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "priority"),
)
"""Of the options of ``ask`` those that OpenAI and vLLM call the same, in a body of /v1/chat/completions."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens the request took. ``image_tokens`` are part of ``prompt_tokens``.

    ``cached_tokens`` too: those that the server knew from earlier prompts. ``drafted_tokens``: those that were drafted
    for the answer and verified, of which ``accepted_tokens`` were right. These are luck, and no part of a comparison.
    """

    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    cached_tokens: int = field(default=0, compare=False)
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the server spent the time, in milliseconds.

    preprocess: decode, tile, tokenize. vision_queue and vision: waiting for and running the vision encoder.
    queue: waiting for the language model. first_token: from its start to the first token. decode: the rest.
    """

    preprocess: float
    vision_queue: float
    vision: float
    queue: float
    first_token: float
    decode: float


@dataclass(frozen=True, slots=True)
class LabelScore:
    """How likely one of a question's ``choices`` is.

    ``logprob`` is the natural log of ``probability``, the model's own: over all labels at most 1, and what is missing
    is its wish to say something else. ``normalized`` is per decision on the way to the label, so that long labels
    are not at a disadvantage, and adds up to 1.
    """

    label: str
    logprob: float
    probability: float
    normalized: float


@dataclass(frozen=True, slots=True)
class Cascade:
    """What became of a request whose tile policy is a cascade. ``margin``: the first cut's answer's, in nats.
    ``escalated``: whether that was too small, so that the answer is the full cut's."""

    margin: float
    escalated: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of a stream: the text that is new in it.

    ``finish_reason`` is empty until the last one, which may have no text; ``usage`` and ``timings`` come with it.
    ``logprobs`` belong to this text, where they were asked for; ``choices`` come with the text that is the best one,
    ``cascade`` with the last. ``fingerprint``: what answers (docs/determinism.md).
    """

    text: str
    finish_reason: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    logprobs: Any = None
    choices: tuple[LabelScore, ...] | None = None
    cascade: Cascade | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    ``finish_reason``: ``"stop"`` (the model ended, or a stop string), ``"length"`` (max_tokens), ``"deadline"``
    (the server ran out of the request's time after some tokens) or ``"cancelled"``.
    ``choices``: each label's score, in the order given, if the question had ``choices``; ``text`` is the best label.
    ``cascade``: what became of it, if its tile policy was one.
    ``seconds`` is the whole time as this side saw it, retries included; ``attempts`` counts them. ``server``: the
    address that answered. ``fingerprint``: the model, the code and the machine that did, and whether bits are kept
    (docs/determinism.md).
    """

    text: str
    finish_reason: str
    usage: Usage | None
    timings: Timings | None
    logprobs: Any
    request_id: str
    seconds: float
    attempts: int = 1
    choices: tuple[LabelScore, ...] | None = None
    server: str = ""
    cascade: Cascade | None = None
    fingerprint: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PictureView:
    """The whole picture resized to ``width`` x ``height`` pixels and cut into ``rows`` x ``columns`` equal parts."""

    width: int
    height: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """What the server makes of one picture.

    ``tokens``: what it takes of the prompt. ``unit``: what a view's parts are, in the plural ("tiles"). ``policies``:
    the names that this model knows of tile policies. ``views``: what the model sees, the finest first.
    """

    tokens: int
    unit: str
    policies: tuple[str, ...]
    views: tuple[PictureView, ...]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model of the server's repository. ``state`` is ``"READY"`` when it can be asked."""

    name: str
    version: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What the server says about itself. ``version`` is tritonserver's."""

    ready: bool
    version: str
    models: tuple[ModelStatus, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server answers with. ``checkpoint``: hexadecimal digits, others for another checkpoint. ``model_type``: as
    its config.json has it."""

    checkpoint: str
    model_type: str


@dataclass(frozen=True, slots=True)
class Models:
    """The names under which a repository serves the contract. Use ``vlm="vlm_stream"`` for the front that notices
    a client which vanishes without a word."""

    vlm: str = "vlm"
    unary: str = "vlm_unary"
    preprocess: str = "preprocess"
    language_model: str = "language_model"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the contract has it. Exactly one of ``text`` and ``messages`` (JSON) is set. ``priority``: that of
    the sampling parameters, for the server's own queues; 0 where they have none, or one that is no number.

    Raises InvalidRequest for text that cannot travel as UTF-8.
    """

    text: str | None = None
    messages: str | None = None
    images: tuple[bytes, ...] = field(default=(), repr=False)
    sampling: str | None = None
    stream: bool = False
    exclude_input: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        for text in (self.text, self.messages, self.sampling):
            try:
                (text or "").encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"half a surrogate pair cannot be sent as text: {error}") from None


def question_request(images: Image | Sequence[Image] | None, question: str, **options: Any) -> Request:
    """The request of ``ask``: zero, one or several pictures and one question. For ``options`` see :func:`sampling`."""
    if not isinstance(question, str):
        raise InvalidRequest(f"the question must be a string, not {type(question).__name__}")
    encoded = tuple(encode_images(_as_list(images)))
    return _request(options, text=question, images=encoded)


def item_request(item: Any, options: Mapping[str, Any]) -> Request:
    """The request of one of ``ask_many``'s items."""
    try:
        images, question = item
    except (TypeError, ValueError):
        raise InvalidRequest(f"an item must be a pair of picture and question, got {item!r:.80}") from None
    return question_request(images, question, **options)


def check_job(items: Any, concurrency: Any, errors: Any) -> None:
    """Raises InvalidRequest for arguments with which ``ask_many`` cannot begin."""
    if not isinstance(items, Iterable):
        raise InvalidRequest(f"items must be pairs of picture and question, not a {type(items).__name__}")
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidRequest(f"concurrency must be a whole number from 1 on, got {concurrency!r:.80}")
    if errors not in ("raise", "return"):
        raise InvalidRequest(f"errors must be 'raise' or 'return', got {errors!r:.80}")


def chat_request(
    messages: Iterable[Mapping[str, Any]], images: Image | Sequence[Image] | None = None, **options: Any
) -> Request:
    """The request of ``chat``: OpenAI-style messages.

    A message's content is a string or a list of parts: ``{"type": "text", "text": ...}``,
    ``{"type": "image_url", "image_url": {"url": "data:..."}}``, ``{"type": "image"}`` (takes the next entry of
    ``images``) or ``{"type": "image", "image": <any Image>}``. Pictures inside the messages are moved out of the
    JSON into the image tensor as raw bytes, in the order they appear.
    """
    supplied = iter(_as_list(images))
    pictures: list[bytes] = []
    if not isinstance(messages, Iterable):
        raise InvalidRequest(f"messages must be a list of messages, not a {type(messages).__name__}")
    turns = [_without_pictures(message, supplied, pictures) for message in messages]
    if not turns:
        raise InvalidRequest("messages is empty: give at least one user message")
    for image in supplied:
        add_image(pictures, image)
    return _request(options, messages=_json("messages", turns), images=tuple(pictures))


def _request(options: dict[str, Any], **contents: Any) -> Request:
    exclude, priority = bool(options.pop("exclude_input_in_output", True)), options.get("priority")
    queued = priority if isinstance(priority, int) else 0  # else the server says what is wrong
    return Request(**contents, sampling=sampling(options), exclude_input=exclude, priority=queued)


def sampling(options: Mapping[str, Any]) -> str | None:
    """``sampling_parameters`` as JSON, or None when all is default.

    The names are vLLM's (max_tokens, min_tokens, temperature, top_p, top_k, min_p, seed, stop,
    stop_token_ids, ignore_eos, logprobs, logit_bias, presence_penalty, frequency_penalty, repetition_penalty,
    no_repeat_ngram_size, priority) plus
    ``choices``, a list of labels, and ``tile_policy``, a name or a dict such as ``{"name": "reference", "max_tiles": 6,
    "thumbnail": "auto"}``; ``max_tiles``, ``min_tiles`` and ``thumbnail`` given directly are moved into it. Models of
    native resolution have ``min_pixels`` and ``max_pixels`` instead. ``draft`` is text that the answer is likely to
    have, ``draft_pool`` a name: answers of requests with the same one may be drafts for one another. Options that are
    None are left to the server; names and ranges are checked by the server, which is the one that knows.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    own = "tile_policy" in chosen  # {} is the deployment's own, and no cascade
    given = chosen.pop("tile_policy", {})
    if not isinstance(given, (str, Mapping)):
        raise InvalidRequest(f"tile_policy must be a name or a dict, not a {type(given).__name__}")
    policy = {"name": given} if isinstance(given, str) else dict(given)
    for name in ("max_tiles", "min_tiles", "thumbnail"):
        if name in chosen:
            policy[name] = chosen.pop(name)
    if policy or own:
        chosen["tile_policy"] = policy
    return _json("sampling parameters", chosen) if chosen else None


def _without_pictures(message: Mapping[str, Any], supplied: Any, pictures: list[bytes]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise InvalidRequest(f"a message must be a dict with role and content, got {message!r:.80}")
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"a message's content must be a string or a list of parts, not {content!r:.80}")
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            image = part["image"] if "image" in part else next(supplied, None)
            if image is None:
                raise InvalidRequest(
                    "the messages hold more image parts than pictures were given", "pass as many images="
                )
            add_image(pictures, image)
            parts.append({name: value for name, value in part.items() if name != "image"})
        elif kind == "image_url" and _url(part).startswith("data:"):
            pictures.append(from_data_url(_url(part)))
            target = part["image_url"]
            detail = target.get("detail") if isinstance(target, Mapping) else None
            parts.append({"type": "image"} if detail is None else {"type": "image", "detail": detail})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _url(part: Mapping[str, Any]) -> str:
    target = part.get("image_url")
    url = target.get("url") if isinstance(target, Mapping) else target
    return url if isinstance(url, str) else ""


def _as_list(images: Image | Sequence[Image] | None) -> list[Image]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from error
