"""Requests whose answers must match what is not compiled yet wait here, each grammar's together, and hold up nobody.

Tries out in a process of its own whether an answer can be constrained as asked.

A schema of a few hundred characters can keep llguidance busy for minutes or take all memory, in ways too many to list,
and only the end of a process cuts that short.
"""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tessera.engine.process.messages import End, Progress, Submit, start_process
from tessera.engine.structured_output.constraints import Constraints
from tessera.errors import InvalidRequest, TesseraError, Unavailable
from tessera.prompt import grammar
from tessera.prompt.sampling import SHAPES, SamplingParameters

_LOG = logging.getLogger(__name__)
MOST_GRAMMARS = 32
_FAILED = Unavailable("what the answer must match could not be compiled; the server's log says why")


class GrammarLane:
    """One thread that tries and compiles one grammar after the other, then submits those that wait for it.

    ``submit`` gives a request to the engine; ``tell`` sends progress: the ends of those that are refused, or were
    cancelled, or too late, before their turn.
    """

    def __init__(
        self, constraints: Constraints, submit: Callable[[Submit], None], tell: Callable[[Progress], None]
    ) -> None:
        self._constraints = constraints
        self._submit, self._tell = submit, tell
        self._trial = GrammarTrial()
        self._lock = threading.Lock()
        self._waiting: dict[Any, dict[int, Submit]] = {}  # by grammar, the first that came first
        self._thread = ThreadPoolExecutor(1, "grammars")

    def put(self, message: Submit) -> None:
        """Takes a request. Raises Unavailable where too many grammars wait."""
        asked = tuple(getattr(message.request.sampling, name) for name in SHAPES)
        with self._lock:
            new = asked not in self._waiting
            if new and len(self._waiting) >= MOST_GRAMMARS:
                raise Unavailable(
                    f"the queue of grammars is full: {MOST_GRAMMARS} wait to be compiled; try again later"
                )
            self._waiting.setdefault(asked, {})[message.request.number] = message
        if new:
            self._thread.submit(self._serve_or_refuse, asked)

    def cancel(self, number: int, reason: str) -> bool:
        """Ends a request that waits here; returns whether it did."""
        with self._lock:
            found = any(each.pop(number, None) for each in self._waiting.values())
        if found:
            self._tell(Progress(ends=[End(number, reason)]))
        return found

    def _serve_or_refuse(self, asked: Any) -> None:
        """No fault of one grammar may leave its requests, or those that ask for it later, to wait for ever."""
        try:
            self._serve(asked)
        except Exception:
            _LOG.exception("a grammar's requests could not be handed on")
            with self._lock:
                left = self._waiting.pop(asked, {})
            for number in left:
                self._tell(Progress.refused(number, _FAILED))

    def _serve(self, asked: Any) -> None:
        """Compiles a grammar and hands on all that wait for it, or refuses them."""
        refusal = None
        while True:
            with self._lock:
                message = next(iter(self._waiting[asked].values()), None)
                if message is None:
                    del self._waiting[asked]
                    return
            refusal = refusal or self._compile(message)  # again where enough copies were made of the one that there was
            with self._lock:  # a cancellation finds it here, or in the engine
                number, deadline = message.request.number, message.request.deadline_ns
                if number not in self._waiting[asked]:
                    continue
                late = deadline is not None and deadline <= time.monotonic_ns()
                if not late and refusal is None:
                    self._submit(message)
                del self._waiting[asked][number]
            if late:
                self._tell(Progress(ends=[End(number, "deadline")]))
            elif refusal is not None:
                self._tell(Progress.refused(number, refusal))

    def _compile(self, message: Submit) -> TesseraError | None:
        sampling = message.request.sampling
        try:
            if not self._constraints.has(sampling):
                self._constraints.compile(sampling, self._trial.check(sampling))
        except TesseraError as error:
            return error
        except Exception:
            _LOG.exception("a grammar could not be compiled")
            return _FAILED
        return None


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
            self._process, self._connection = start_process("tessera.engine.structured_output.compiling")
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
