"""How long tritonserver waits for the process of a stage before it takes it for dead: ten seconds, not one.

Release 24.10's Python backend waits one second, which nothing sets. A process that lives but did not run for so long,
on an overloaded or paused machine, has its requests answered by an error and their memory freed; when it goes on, it
and the server read that memory, and the server crashes. So the backend's library is used with its second made longer.
A process that is really dead the launcher notices by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

LIBRARY = "libtriton_python.so"
PATIENCE_S = 10
JULIAN_DAY_OF_1970 = 2_440_588


def patient(library: bytes) -> bytes:
    """The library with its patience; the same bytes if it is of another build, which has no such second."""
    return library.replace(_wait(1), _wait(PATIENCE_S))


def _wait(seconds: int) -> bytes:
    """The number in the machine code that makes a deadline for the system, in microseconds since 1970, of the time now
    as boost counts it, from Julian day 0: the wait less the days between the two."""
    return ((seconds - JULIAN_DAY_OF_1970 * 86_400) * 1_000_000).to_bytes(8, "little", signed=True)


if __name__ == "__main__":  # of an installation itself, when an image is made
    path = Path(sys.argv[1])
    path.write_bytes(patient(path.read_bytes()))
