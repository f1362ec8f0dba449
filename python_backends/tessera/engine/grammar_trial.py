"""Tries out in a process of its own whether an answer can be constrained as asked.

A schema of a few hundred characters can keep llguidance busy for minutes or take all memory, in ways too many to list,
and only the end of a process cuts that short.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from tessera import grammar, own_process
from tessera.errors import InvalidRequest
from tessera.sampling import SHAPES, SamplingParameters

CPU_SECONDS = 1.0
_MOST_BYTES = 2 << 30
_MOST_KEPT = 64
_FORMS = SHAPES[1:]


class GrammarTrial:
    """:func:`grammar.check` in a process that begins with the first request that needs it. For one thread."""

    def __init__(self) -> None:
        self._tried = lru_cache(_MOST_KEPT)(self._try)  # what is refused is tried again
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, parameters: SamplingParameters) -> None:
        """Raises InvalidRequest where no answer could be constrained as asked, or only at too high a cost."""
        if parameters.constraint is not None:
            self._tried(*(getattr(parameters, name) for name in _FORMS))

    def _try(self, *forms: Any) -> None:
        parameters = SamplingParameters(**dict(zip(_FORMS, forms)))
        if self._process is None or self._process.poll() is not None:
            self._process, self._connection = own_process.start("tessera.engine.grammar_trial")
            self._connection.recv()  # ready
        assert self._connection is not None
        try:
            self._connection.send(parameters)
            refused: InvalidRequest | None = self._connection.recv()
        except (EOFError, OSError):
            self._process.kill()
            self._process.wait()
            raise InvalidRequest(
                f"sampling_parameters: {parameters.constraint} is too complex: it takes more than {CPU_SECONDS:g} s "
                "or too much memory to prepare"
            ) from None
        if refused is not None:
            raise refused


def main() -> None:
    """Says None when ready, then for each SamplingParameters None or why not; a signal ends it where it takes long."""
    connection = Connection(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    grammar.check(SamplingParameters(json_object=True))  # imports, on no request's account
    connection.send(None)
    while True:
        try:
            parameters: SamplingParameters = connection.recv()
        except (EOFError, OSError):
            return
        refused = None
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        try:
            grammar.check(parameters)
        except InvalidRequest as error:
            refused = error
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        connection.send(refused)


if __name__ == "__main__":
    main()
