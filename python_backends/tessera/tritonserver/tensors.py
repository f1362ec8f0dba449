"""Reading a request's tensors and making a response's, with errors that name the input.

Picture rows between the stages: EMBEDDINGS is bfloat16; float32 rows keep their bits, a number as two halves.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.errors import InvalidRequest
from tessera.tritonserver import backend
from tessera_wire.line import LEASE, SINCE

if TYPE_CHECKING:
    import torch


# What parsing may cost: JSON of small values takes a hundred times its own size in memory.
JSON_VALUES = 250_000
JSON_DEPTH = 32
# Request parameters that are the server's own, its clients' or a forwarded header's. The generate endpoints hand on all
# that a body has beside the inputs, the id and what the infer endpoint keeps to itself included.
NOT_OURS = re.compile(r"id|model|priority|sequence_\w+|binary_data_output|headers|traceparent|triton_\w+|.*-.*")
FLAGS = ("stream", "exclude_input_in_output")


def array(request: Any, name: str) -> np.ndarray | None:
    """The named input as a numpy array (a view of the server's memory where possible), or None if absent."""
    tensor = backend().get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def byte_strings(request: Any, name: str) -> list[bytes]:
    """All elements of a BYTES input; an absent input is an empty list."""
    values = array(request, name)
    return [] if values is None else [bytes(value) for value in values.reshape(-1)]


def text(request: Any, name: str) -> str | None:
    """The single element of a BYTES[1] input as text, or None if absent."""
    values = byte_strings(request, name)
    if not values:
        return None
    if len(values) != 1:
        raise InvalidRequest(f"input '{name}' takes exactly one element, got {len(values)}")
    try:
        return values[0].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{name}' is not valid UTF-8 (byte {error.start})") from None


def json_value(request: Any, name: str, wanted: type) -> Any:
    """The single element of a BYTES[1] input parsed as JSON; None if absent or empty.

    Args:
        wanted: list or dict.
    """
    value = text(request, name)
    if not value:
        return None
    if sum(map(value.count, "[{,")) > JSON_VALUES:
        raise InvalidRequest(f"input '{name}' has more than {JSON_VALUES} brackets and commas; send less")
    try:
        parsed = json.loads(value)
        nested = _deeper_than(JSON_DEPTH, parsed)
    except RecursionError:
        nested = True
    except ValueError as error:
        raise InvalidRequest(f"input '{name}' is not valid JSON: {error}") from None
    if nested:
        raise InvalidRequest(f"input '{name}' is nested more than {JSON_DEPTH} levels deep")
    if not isinstance(parsed, wanted):
        kind = "an array" if wanted is list else "an object"
        raise InvalidRequest(f"input '{name}' must be {kind} in JSON, got {type(parsed).__name__}")
    return parsed


def _deeper_than(levels: int, value: Any) -> bool:
    found = [value]
    for _ in range(levels):
        groups = (v.values() if isinstance(v, dict) else v for v in found if isinstance(v, (dict, list)))
        found = [item for group in groups for item in group]
        if not found:
            return False
    return True


def flag(request: Any, name: str, default: bool) -> bool:
    """The single element of a BOOL[1] input, or the request parameter of that name. Raises InvalidRequest."""
    values = array(request, name)
    given = [] if values is None else [bool(value) for value in values.reshape(-1)[:1]]
    given += [value for key, value in _parameters(request) if key == name]
    words = {str(value).lower() for value in given}
    if len(words) > 1:
        raise _given_twice(name, given[0], given[-1])
    if not words <= {"true", "false"}:
        raise InvalidRequest(f"request parameter '{name}' must be true or false, not {given[0]!r:.50}")
    return "true" in words if words else default


def sampling(request: Any, name: str) -> dict[str, Any]:
    """The named JSON input and the request's parameters, where Triton's vLLM backend takes them too, in one.

    Which keys there are, and what they may be, is not checked here. Raises InvalidRequest where one is given twice.
    """
    merged = dict(json_value(request, name, dict) or {})
    for key, value in _parameters(request):
        if key not in FLAGS and merged.setdefault(key, value) != value:
            raise _given_twice(key, merged[key], value)
    return merged


def _parameters(request: Any) -> list[tuple[str, Any]]:
    """Names and values; a name twice where the body and its "parameters" both have it. `timeout` as failures.py has it.

    `timeout` is here where the server did not take it for itself: from the generate endpoints.
    """
    pairs = json.loads(request.parameters() or "{}", object_pairs_hook=list)
    return [
        ("timeout_us" if name == "timeout" else name, value) for name, value in pairs if not NOT_OURS.fullmatch(name)
    ]


def _given_twice(name: str, first: Any, second: Any) -> InvalidRequest:
    return InvalidRequest(
        f"'{name}' is given twice: {first!r:.50} and, as a request parameter, {second!r:.50}; send one of them"
    )


def lease(request: Any) -> str:
    """The leases that the request names (leases.py), with spaces between. Raises InvalidRequest."""
    value = json.loads(request.parameters() or "{}").get(LEASE, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"request parameter '{LEASE}' must be text, not {value!r:.50}")
    return value


def since(request: Any) -> int:
    """When the request first came, of one that goes on with another cut of its pictures; 0 of all others.

    On time.monotonic_ns's clock. Raises InvalidRequest.
    """
    value = json.loads(request.parameters() or "{}").get(SINCE, "0")
    if not (isinstance(value, str) and value.isdecimal() and len(value) < 20 and int(value) <= time.monotonic_ns()):
        raise InvalidRequest(f"request parameter '{SINCE}' is the server's own; leave it out")
    return int(value)


class RequestTimestamps(NamedTuple):
    """What STAMPS carries from stage to stage; times are nanoseconds on time.monotonic_ns's clock.

    ``deadline``: 0 for none. ``priority``: lower goes first. The others: when preprocess ``received`` the request and
    had it ``prepared``, and when the vision stage began ``encoding`` and had its pictures ``encoded``.
    """

    deadline: int = 0
    priority: int = 0
    received: int = 0
    prepared: int = 0
    encoding: int = 0
    encoded: int = 0


OF_PREPROCESS, OF_BOTH = 4, 6
"""Values of STAMPS behind preprocess, and behind a vision stage that keeps time (a TensorRT plan does not)."""


def timestamps(request: Any, name: str, stage: str, *sizes: int) -> RequestTimestamps:
    """The named input (STAMPS), of one of these ``sizes``; zeros without any, as in a ping.

    Where the vision stage gave no times, all that passed since preprocess ended is its own. Raises InvalidRequest.
    """
    values = array(request, name)
    if values is None:
        return RequestTimestamps()
    if values.size not in sizes:
        wanted = " or ".join(map(str, sizes))
        raise InvalidRequest(f"STAMPS has {values.size} values; {stage} wants {wanted}")
    found = RequestTimestamps(*values.reshape(-1).tolist())
    if values.size == OF_BOTH:
        return found
    return found._replace(encoding=found.prepared, encoded=time.monotonic_ns())


def output(name: str, values: np.ndarray) -> Any:
    """An output tensor backed by a numpy array."""
    return backend().Tensor(name, values)


def response(outputs: Iterable[Any]) -> Any:
    """A response of these outputs."""
    return backend().InferenceResponse(output_tensors=list(outputs))


def text_output(name: str, value: str) -> Any:
    """A BYTES[1] output."""
    return output(name, np.array([value.encode("utf-8")], dtype=np.object_))


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, hidden] of any float dtype -> bfloat16 [n, hidden], or [n, 2 * hidden] with the bits of float32 ones."""
    import torch  # which not every stage has

    if rows.dtype == torch.float32:
        return rows.contiguous().view(torch.bfloat16)
    return rows.to(torch.bfloat16).contiguous()


def unpacked(rows: torch.Tensor, hidden: int) -> torch.Tensor:
    """What :func:`packed` made -> rows [n, hidden], bfloat16 or float32; shares its memory."""
    import torch

    return rows.view(torch.float32) if rows.shape[-1] == 2 * hidden else rows
