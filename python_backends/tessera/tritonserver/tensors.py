"""Reading a request's tensors and making a response's, with errors that name the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import InvalidRequest


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
