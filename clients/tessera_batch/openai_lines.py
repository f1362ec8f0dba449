"""A line of OpenAI's batch files, ``{"custom_id", "method", "url", "body"}``, as a row: such as the gateway's Batch API
takes. What the body holds and has no meaning here is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera_wire.errors import InvalidRequest

URL = "/v1/chat/completions"
MESSAGES = ("messages",)
"""Fields of such a row beside those of others."""
SAME_NAME = frozenset(
    (
        *("temperature", "top_p", "top_k", "stop", "seed", "min_tokens", "ignore_eos", "skip_special_tokens"),
        *("include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty", "priority"),
        *("max_tokens", "min_p", "stop_token_ids", "logit_bias"),
    )
)
"""As the SDK has it; what this server does not know, it refuses by name."""
WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
OF_ONE_ANSWER: Mapping[str, tuple[Any, ...]] = {"n": (1,), "stream": (False,), "tools": ([],), "tool_choice": ("none",)}
"""Allowed with these values, which say what is done anyway."""


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether it is such a line and no row of ours."""
    return "body" in fields and "image" not in fields


def row_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """``id``, ``messages`` and ``options`` of the row. Raises InvalidRequest."""
    unknown = sorted(line.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise InvalidRequest(f"a line of a batch has custom_id, method, url and body, and no {', '.join(unknown)}")
    if "custom_id" not in line:
        raise InvalidRequest("it has no custom_id")
    if line.get("method", "POST") != "POST" or line.get("url", URL) != URL:
        raise InvalidRequest(f"only POST {URL} is asked here, not {line.get('method')!r} {line.get('url')!r:.80}")
    body = line["body"]
    if not isinstance(body, dict):
        raise InvalidRequest(f"its body must be an object, not {body!r:.80}")
    body = {name: value for name, value in body.items() if value is not None}
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"its body needs messages, a list that is not empty, not {messages!r:.80}")
    messages = [
        {**message, "role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
        for message in messages
    ]
    return {"id": line["custom_id"], "messages": messages, "options": _options(body)}


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in body.items() if name in SAME_NAME}
    rest = {name: value for name, value in body.items() if name not in SAME_NAME and name not in WITHOUT_EFFECT}
    for name, allowed in OF_ONE_ANSWER.items():
        if name in rest and rest.pop(name) not in allowed:
            raise InvalidRequest(f"body.{name} is not served here", f"leave {name} out")
    longest = rest.pop("max_completion_tokens", None)
    if longest is not None and options.setdefault("max_tokens", longest) != longest:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", "send one of them")
    logprobs, top = rest.pop("logprobs", False), rest.pop("top_logprobs", None)
    if logprobs is True:
        options["logprobs"] = top or 0
    elif logprobs is not False or top is not None:
        raise InvalidRequest("logprobs must be true or false, and top_logprobs needs logprobs: true")
    options |= _form(rest.pop("response_format", {"type": "text"}))
    own = _part("tessera", rest.pop("tessera", {}), ("choices", "regex", "tile_policy"))
    own |= _part("vllm_xargs", rest.pop("vllm_xargs", {}), ("no_repeat_ngram_size",))
    own |= _part("mm_processor_kwargs", rest.pop("mm_processor_kwargs", {}), ("min_pixels", "max_pixels"))
    if rest:
        raise InvalidRequest(f"body.{min(rest)} is not known here", f"leave {', '.join(sorted(rest))} out")
    return options | own


def _form(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise InvalidRequest(
            f"body.response_format must be of type text, json_object or json_schema, not {given!r:.80}"
        )
    return {"json_schema": named["schema"]}


def _part(name: str, given: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict) or given.keys() - set(known):
        raise InvalidRequest(f"body.{name} must be an object of {', '.join(known)}, not {given!r:.80}")
    return {name: value for name, value in given.items() if value is not None}
