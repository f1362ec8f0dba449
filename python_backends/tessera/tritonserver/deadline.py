"""A request's deadline, decided once, in preprocess, and carried to the later stages as the first of its STAMPS.

The client gives it as tritonserver's own parameter `timeout` (microseconds). Calls between models lose that one and
the generate endpoints have no place for it, so `timeout_us` in sampling_parameters counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tessera.errors import InvalidRequest
from tessera.tritonserver.failures import failure

KEY = "timeout_us"
LONGEST = 10**15  # microseconds: 31 years


def deadline_ns(request: Any, sampling: Mapping[str, Any], received_ns: int) -> int:
    """When the request's time is up, on time.monotonic_ns's clock; 0 if it has no end.

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
    microseconds = min(request.timeout(), LONGEST) or given
    return received_ns + 1000 * microseconds if microseconds else 0


def is_over(deadline: int) -> bool:
    """Whether a deadline (0: none) has passed."""
    return 0 < deadline <= time.monotonic_ns()


def deadline_exceeded(received_ns: int) -> Any:
    """The answer to a request whose time ran out before it had a token."""
    spent = (time.monotonic_ns() - received_ns) / 1e6
    return failure("UNAVAILABLE", f"deadline exceeded after {spent:.0f} ms")
