"""Reading a request's tensors and making a response's, with errors that name the input."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tessera.errors import InvalidRequest

# What parsing may cost: JSON of small values takes a hundred times its own size in memory.
JSON_VALUES = 250_000
JSON_DEPTH = 32


def array(request: Any, name: str) -> np.ndarray | None:
    """The named input as a numpy array (a view of the server's memory where possible), or None if absent."""
    import triton_python_backend_utils as pb_utils

    tensor = pb_utils.get_input_tensor_by_name(request, name)
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
    """The single element of a BOOL[1] input."""
    values = array(request, name)
    return default if values is None or values.size == 0 else bool(values.reshape(-1)[0])


def output(name: str, values: np.ndarray) -> Any:
    """An output tensor backed by a numpy array."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.Tensor(name, values)


def text_output(name: str, value: str) -> Any:
    """A BYTES[1] output."""
    return output(name, np.array([value.encode("utf-8")], dtype=np.object_))
