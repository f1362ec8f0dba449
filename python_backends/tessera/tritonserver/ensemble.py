"""This server's own ensemble, asked over gRPC: what it is sent, and what it answers as a response of this stage.

Tensors pass through as they are: preprocess checks a request, the ensemble's config says what is answered.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.tritonserver import tensors
from tessera.tritonserver.failures import failure
from tessera_wire import errors
from tessera_wire.tensors import Tensor, bytes_tensor, elements

ENSEMBLE = "vlm"
CLOSE_SECONDS = 3.0
NUMBERS = {"INT32": np.int32, "FP32": np.float32}

# The ensemble's errors -> the status that is answered; whatever is not here is INTERNAL.
STATUS: dict[type[errors.TesseraClientError], str] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.Unavailable: "UNAVAILABLE",
    errors.DeadlineExceeded: "UNAVAILABLE",
    errors.ConnectionFailed: "UNAVAILABLE",
    errors.Cancelled: "CANCELLED",
}


def inputs(
    texts: Iterable[tuple[str, Sequence[bytes]]], sampling: Mapping[str, Any], flags: Mapping[str, bool]
) -> list[Tensor]:
    """A request's inputs: those of bytes by name, its sampling parameters if it has any, its flags."""
    found = [bytes_tensor(name, *values) for name, values in texts]
    if sampling:
        found.append(bytes_tensor("sampling_parameters", json.dumps(sampling).encode()))
    return [*found, *(Tensor(name, "BOOL", (1,), bytes([value])) for name, value in flags.items())]


def outputs(message: Any) -> dict[str, np.ndarray]:
    """A response's (a ModelInferResponse's) tensors by name."""
    told = zip(message.outputs, message.raw_output_contents, strict=True)
    return {each.name: _values(each.datatype, raw).reshape(each.shape) for each, raw in told}


def response(arrays: Mapping[str, np.ndarray]) -> Any:
    """A response of this stage with these outputs."""
    return tensors.response([tensors.output(name, values) for name, values in arrays.items()])


def failed(error: errors.TesseraClientError | None) -> Any:
    """The response to a request that ended with this error, or without an answer."""
    if error is None:
        return failure("INTERNAL", "the ensemble gave no answer")
    return failure(STATUS.get(type(error), "INTERNAL"), error.message)


def _values(datatype: str, raw: bytes) -> np.ndarray:
    """A BYTES, INT32 or FP32 tensor's raw contents as a flat array."""
    if datatype == "BYTES":
        return np.array(list(elements(raw)), dtype=np.object_)
    return np.frombuffer(bytearray(raw), dtype=NUMBERS[datatype])
