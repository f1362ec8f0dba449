"""The servers' refusals in the API's words: their names for what was asked become the fields that a request has."""

from __future__ import annotations

import re
from typing import NamedTuple

FIELDS = {
    "json_schema": "response_format.json_schema.schema",
    "json_object": "response_format",
    "regex": "tessera.regex",
    "choices": "tessera.choices",
    "tile_policy": "tessera.tile_policy",
    "logprobs": "top_logprobs",
    "no_repeat_ngram_size": "vllm_xargs.no_repeat_ngram_size",
    "min_pixels": "mm_processor_kwargs.min_pixels",
    "max_pixels": "mm_processor_kwargs.max_pixels",
}
"""Of the sampling parameters those that the API has elsewhere; the others are called the same."""
PARAMETER = re.compile(r"(?:sampling_parameters: )(?!unknown key)([a-z_]+)((?:\.[^\s:]+|\[\d+\])*)")
SHAPE = re.compile(r"(json_schema|json_object|regex|choices)()(?= needs? )")
MESSAGE = re.compile(r"messages(?:\[\d+\](?:\.\w+|\[\d+\])*)?(?=[ :.])")
PICTURE = re.compile(r"image \d+ ")
TOO_LONG = re.compile(
    r"exceed the context|leaves no room for an answer|tokens than the context|can never fit the cache"
)
INTERNAL = (
    (re.compile(r"^(?:preprocess|vision_encoder|language_model|vlm\w*) failed on this request"), "the server failed"),
    (re.compile(r"^language_model failed: "), ""),
    (re.compile(r"^sampling_parameters:? "), ""),
    (re.compile(r"\binput 'text_input'|\btext_input\b"), "messages"),
    (re.compile(r"\binput '(\w+)'"), r"\1"),
)


class Refusal(NamedTuple):
    """``param``: the path of the field at fault, where the words tell."""

    message: str
    param: str | None
    code: str = "invalid_request"


def in_api_words(words: str) -> Refusal:
    """What a server says of a request, as somebody reads it who knows the API alone."""
    if TOO_LONG.search(words):
        return Refusal(words, "messages", "context_length_exceeded")
    if named := PARAMETER.match(words) or SHAPE.match(words):
        param = FIELDS.get(named[1], named[1]) + named[2]
        return Refusal(f"{param}{words[named.end() :]}", param)
    words = without_internals(words)
    if words.startswith("tile policy"):
        return Refusal(words, FIELDS["tile_policy"])
    if (place := MESSAGE.match(words)) or PICTURE.match(words):
        return Refusal(words, place[0] if place else "messages")
    return Refusal(words, None)


def without_internals(words: str) -> str:
    """The words without names of stages and tensors, which no client of the API knows."""
    for pattern, instead in INTERNAL:
        words = pattern.sub(instead, words)
    return words
