"""Exceptions become error responses here, so that no traceback or path of this machine reaches a client."""

from __future__ import annotations

from typing import Any

from tessera.errors import InvalidRequest, Unavailable


def error_response(stage: str, error: BaseException) -> Any:
    """An InferenceResponse that carries the error: the message of an expected one, a plain line for any other.

    The traceback of an unexpected error goes to the server's log.
    """
    import triton_python_backend_utils as pb_utils

    if isinstance(error, InvalidRequest):
        failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
    elif isinstance(error, Unavailable):
        failure = pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE)
    else:
        log_exception(stage, error)
        failure = pb_utils.TritonError(f"{stage} failed on this request; the server's log says why")
    return pb_utils.InferenceResponse(output_tensors=[], error=failure)


def log_exception(stage: str, error: BaseException) -> None:
    """Writes an exception with its traceback to the server's log."""
    import traceback

    import triton_python_backend_utils as pb_utils

    pb_utils.Logger.log_error(f"{stage}: {''.join(traceback.format_exception(error))}")
