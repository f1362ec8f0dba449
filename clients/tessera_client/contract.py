"""The tensors that client and server agree on, as bytes and as JSON; shared by the gRPC and the HTTP transport."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tessera_client.messages import (
    Cascade,
    Delta,
    LabelScore,
    PicturePlan,
    PictureView,
    Request,
    ServedModel,
    Timings,
    Usage,
)
from tessera_wire.errors import ProtocolError
from tessera_wire.tensors import Tensor, bytes_tensor, elements

T = TypeVar("T")


def request_tensors(request: Request) -> list[Tensor]:
    """The request's inputs; those that are not set are left out (all are optional on the server)."""
    flags = (("stream", request.stream), ("exclude_input_in_output", request.exclude_input))
    return question_tensors(request) + [Tensor(name, "BOOL", (1,), bytes([flag])) for name, flag in flags]


def question_tensors(request: Request) -> list[Tensor]:
    """Those of the request's inputs that say what is asked, not how the answer comes: what `preprocess` takes."""
    tensors = [bytes_tensor(name, text.encode()) for name, text in _texts(request).items()]
    if request.images:
        tensors.append(bytes_tensor("image", *request.images))
    return tensors


def served_tensors() -> list[Tensor]:
    """What asks `preprocess` for SERVED."""
    return [bytes_tensor("PING", b"?")]


def request_json(request: Request, request_id: str, timeout: float | None) -> dict[str, Any]:
    """The body of a generate endpoint: same names, pictures as base64 text.

    The seconds it may take stand in the sampling parameters, as these endpoints have no other place for them.
    """
    flags = {"stream": request.stream, "exclude_input_in_output": request.exclude_input}
    if timeout is not None:
        sampling = {"timeout_us": microseconds(timeout), **json.loads(request.sampling or "{}")}
        request = replace(request, sampling=json.dumps(sampling))
    images = [base64.b64encode(image).decode("ascii") for image in request.images]
    return {"id": request_id, **flags, **_texts(request), **({"image": images} if images else {})}


def microseconds(timeout: float) -> int:
    """Seconds as the server counts them: whole and not 0, which would be no limit."""
    return max(1, int(timeout * 1e6))


def _texts(request: Request) -> dict[str, str]:
    texts = {"text_input": request.text, "messages": request.messages, "sampling_parameters": request.sampling}
    return {name: text for name, text in texts.items() if text is not None}


def delta_from_raw(outputs: Iterable[tuple[str, bytes]]) -> Delta:
    """A response's outputs, (name, raw contents), as a :class:`Delta`. Raises ProtocolError."""
    values: dict[str, Any] = {}
    try:
        for name, data in outputs:
            if name in ("text_output", "finish_reason", "logprobs", "choices", "cascade", "fingerprint"):
                values[name] = next(elements(data), b"").decode("utf-8", "replace")
            elif name in ("usage", "cached_tokens", "drafted_tokens"):
                values[name] = struct.unpack(f"<{len(data) // 4}i", data)
            elif name == "timings":
                values[name] = struct.unpack(f"<{len(data) // 4}f", data)
    except struct.error as error:
        raise ProtocolError(f"output {name} is malformed: {error}") from error
    return delta_from_json(values)


def plans_from_raw(outputs: Iterable[tuple[str, bytes]]) -> tuple[PicturePlan, ...]:
    """The output CUT among (name, raw contents): a JSON array, an object a picture. Raises ProtocolError."""
    return _told(outputs, "CUT", "how it cuts pictures", lambda plans: tuple(map(_plan, plans)))


def served_from_raw(outputs: Iterable[tuple[str, bytes]]) -> ServedModel:
    """The output SERVED among (name, raw contents): a JSON object. Raises ProtocolError."""
    return _told(outputs, "SERVED", "what is served", lambda it: ServedModel(it["checkpoint"], it["model_type"]))


def _plan(told: dict[str, Any]) -> PicturePlan:
    views = tuple(PictureView(**view) for view in told["views"])
    return PicturePlan(told["tokens"], told["unit"], tuple(told["policies"]), views)


def _told(outputs: Iterable[tuple[str, bytes]], name: str, what: str, read: Callable[[Any], T]) -> T:
    try:
        (text,) = elements(dict(outputs)[name])
        return read(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise ProtocolError(f"preprocess did not say {what} ({name}): {error!r:.99}") from None


def delta_from_json(values: Mapping[str, Any]) -> Delta:
    """A generate endpoint's JSON object as a :class:`Delta`. Raises ProtocolError."""
    try:
        text, ended = values["text_output"], values.get("finish_reason", "")
        if not isinstance(text, str) or not isinstance(ended, str):
            raise TypeError("text_output and finish_reason must be text")
        usage = values.get("usage")  # zeros until the last response, as timings are
        cached = values.get("cached_tokens", (0,))  # servers of before have none
        cached = (cached,) if isinstance(cached, int) else cached  # in JSON
        drafted = values.get("drafted_tokens", ())
        timings = values.get("timings")
        logprobs = values.get("logprobs")
        choices = values.get("choices")
        cascade = values.get("cascade")
        return Delta(
            text=text,
            finish_reason=ended,
            usage=Usage(*usage, *cached, *drafted) if usage and ended else None,
            timings=Timings(*timings) if timings and ended else None,
            logprobs=json.loads(logprobs) if logprobs else None,
            choices=tuple(LabelScore(**score) for score in json.loads(choices)) if choices else None,
            cascade=Cascade(**json.loads(cascade)) if cascade else None,
            fingerprint=values.get("fingerprint", ""),  # servers of before have none
        )
    except KeyError as error:
        raise ProtocolError(
            f"the response has no output {error}; it has {sorted(values)}",
            "is this model a Tessera ensemble?",
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the response does not follow the contract: {error}") from error
