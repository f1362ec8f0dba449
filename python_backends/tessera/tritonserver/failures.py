"""Exceptions become error responses here, so that no traceback or path of this machine reaches a client.

A request's deadline, decided once, in preprocess, and carried to the later stages as the first of its STAMPS.

The client gives it as tritonserver's own parameter `timeout` (microseconds). Calls between models lose that one and
the generate endpoints have no place for it, so `timeout_us` in sampling_parameters counts as well.

One lock for all that a stage's process tells the server unasked: metrics and lines of the log.
"""

import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from tessera.errors import InvalidRequest, Unavailable
from tessera.tritonserver import backend


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
    pb_utils = backend()
    code = getattr(pb_utils.TritonError, "INVALID_ARG" if status == "INVALID_ARGUMENT" else status)
    error = pb_utils.TritonError(f"{status}: {message}", code)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def log_exception(stage: str, error: BaseException) -> None:
    """Writes an exception with its traceback to the server's log."""
    with SPEAKING:
        backend().Logger.log_error(f"{stage}: {''.join(traceback.format_exception(error))}")


KEY = "timeout_us"
LONGEST = 10**15  # microseconds: 31 years


def deadline_ns(request: Any, sampling: Mapping[str, Any], received_ns: int) -> int:
    """When the request's time is up, on time.monotonic_ns's clock; 0 if it has no end. Of two times the shorter counts.

    Args:
        request: tritonserver's request.
        sampling: its parsed sampling_parameters.
        received_ns: when it arrived.
    """
    given = sampling.get(KEY, 0)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= LONGEST:
        raise InvalidRequest(
            f"sampling_parameters: {KEY} must be a whole number of microseconds between 0 and {LONGEST}, "
            f"not {given!r:.50}"
        )
    microseconds = min(filter(None, (request.timeout(), given)), default=0)
    return received_ns + 1000 * min(microseconds, LONGEST) if microseconds else 0


def is_over(deadline: int) -> bool:
    """Whether a deadline (0: none) has passed."""
    return 0 < deadline <= time.monotonic_ns()


def deadline_exceeded(received_ns: int) -> Any:
    """The answer to a request whose time ran out before it had a token."""
    spent = (time.monotonic_ns() - received_ns) / 1e6
    return failure("UNAVAILABLE", f"deadline exceeded after {spent:.0f} ms")


SPEAKING = threading.RLock()
