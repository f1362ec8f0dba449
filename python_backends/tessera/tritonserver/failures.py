"""Exceptions become error responses here, so that no traceback or path of this machine reaches a client."""

from __future__ import annotations

from typing import Any

from tessera.errors import InvalidRequest, Unavailable
from tessera.tritonserver.speaking import SPEAKING


def error_response(stage: str, error: BaseException) -> Any:
    """An InferenceResponse that carries the error: the message of an expected one, a plain line for any other.

    The traceback of an unexpected error goes to the server's log.
    """
    if isinstance(error, InvalidRequest):
        return failure("INVALID_ARGUMENT", str(error))
    if isinstance(error, Unavailable):
        return failure("UNAVAILABLE", str(error))
    log_exception(stage, error)
    return failure("INTERNAL", f"{stage} failed on this request; the server's log says why")


def failure(status: str, message: str) -> Any:
    """An InferenceResponse with one error, whose words begin with its status.

    gRPC streams and the generate endpoints hand on an error's words but not its code.

    Args:
        status: INVALID_ARGUMENT, UNAVAILABLE, CANCELLED or INTERNAL, gRPC's names.
        message: what the client reads.
    """
    import triton_python_backend_utils as pb_utils

    code = getattr(pb_utils.TritonError, "INVALID_ARG" if status == "INVALID_ARGUMENT" else status)
    error = pb_utils.TritonError(f"{status}: {message}", code)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def log_exception(stage: str, error: BaseException) -> None:
    """Writes an exception with its traceback to the server's log."""
    import traceback

    import triton_python_backend_utils as pb_utils

    with SPEAKING:
        pb_utils.Logger.log_error(f"{stage}: {''.join(traceback.format_exception(error))}")
