"""Tries out in a process of its own whether an answer can be constrained as asked.

A schema of a few hundred characters can keep llguidance busy for minutes or take all memory, in ways too many to list,
and only the end of a process cuts that short.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tessera import grammar, own_process
from tessera.errors import InvalidRequest
from tessera.sampling import SHAPES, SamplingParameters

CPU_SECONDS = 1.0
MOST_BYTES = 128 << 20
"""Of what is compiled, and of all that it takes to do so."""
_MOST_KEPT = 64
_FORMS = SHAPES[1:]


class GrammarTrial:
    """:func:`grammar.check` in a process that begins with the first request that needs it. For one thread."""

    def __init__(self) -> None:
        self._tried = lru_cache(_MOST_KEPT)(self._try)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, parameters: SamplingParameters) -> int:
        """Bytes of what is compiled.

        Raises InvalidRequest where no answer could be constrained as asked, or only at too high a cost.
        """
        verdict = self._tried(*(getattr(parameters, name) for name in _FORMS))
        if isinstance(verdict, InvalidRequest):
            raise verdict.with_traceback(None)
        return verdict

    def _try(self, *forms: Any) -> InvalidRequest | int:
        parameters = SamplingParameters(**dict(zip(_FORMS, forms)))
        if self._process is None or self._process.poll() is not None:
            self._process, self._connection = own_process.start("tessera.engine.grammar_trial")
            self._connection.recv()  # ready
        assert self._connection is not None
        try:
            self._connection.send(parameters)
            verdict: InvalidRequest | int = self._connection.recv()
        except (EOFError, OSError):
            self._process.kill()
            self._process.wait()
            raise _too_complex(parameters) from None
        return verdict


def _too_complex(parameters: SamplingParameters) -> InvalidRequest:
    return InvalidRequest(
        f"sampling_parameters: {parameters.constraint} is too complex: it takes more than {CPU_SECONDS:g} s "
        f"or {MOST_BYTES >> 20} MiB to prepare"
    )


def main() -> None:
    """Says None when ready, then of each SamplingParameters the bytes of what is compiled or why it is not.

    Each is tried in a child, which a signal ends where it takes long.
    """
    connection = Connection(int(sys.argv[1]))
    os.nice(grammar.NICE)
    grammar.check(SamplingParameters(json_object=True))  # imports, on no request's account
    connection.send(None)
    while True:
        try:
            parameters: SamplingParameters = connection.recv()
        except (EOFError, OSError):
            return
        if (child := os.fork()) == 0:
            _try_here(parameters, connection)
        if os.waitpid(child, 0)[1] != 0:
            connection.send(_too_complex(parameters))


def _try_here(parameters: SamplingParameters, connection: Connection) -> NoReturn:
    """Sends the verdict and ends this process; or ends it without one."""
    status = 1
    try:
        size, resident = _memory()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES,) * 2)
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        verdict: InvalidRequest | int
        try:
            grammar.check(parameters)
            verdict = max(0, _memory()[1] - resident)
        except InvalidRequest as error:
            verdict = error
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        connection.send(verdict)
        status = 0
    finally:
        os._exit(status)


def _memory() -> tuple[int, int]:
    """Bytes of this process: those it may touch, and those it has."""
    with open("/proc/self/statm") as pages:
        size, resident = (int(number) * resource.getpagesize() for number in pages.read().split()[:2])
    return size, resident


if __name__ == "__main__":
    main()
