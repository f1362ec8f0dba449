"""Requests whose answers must match what is not compiled yet wait here, each grammar's together, and hold up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tessera.engine.engine import Engine
from tessera.engine.grammar_trial import GrammarTrial
from tessera.engine.progress import End, Progress
from tessera.engine.wire import Submit
from tessera.errors import TesseraError, Unavailable
from tessera.sampling import SHAPES

_LOG = logging.getLogger(__name__)
MOST_GRAMMARS = 32


class GrammarLane:
    """One thread that tries and compiles one grammar after the other, then submits those that wait for it.

    ``submit`` gives a request to the engine and its sender the answer; ``refuse`` tells the sender that it was not
    taken; ``tell`` sends progress: the ends of those that were cancelled, or too late, before their turn.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Submit], None],
        refuse: Callable[[int, TesseraError | None], None],
        tell: Callable[[Progress], None],
    ) -> None:
        self._engine = engine
        self._submit, self._refuse, self._tell = submit, refuse, tell
        self._trial = GrammarTrial()
        self._changed = threading.Condition()
        self._waiting: dict[Any, dict[int, Submit]] = {}  # by grammar, the first that came first
        self._thread: threading.Thread | None = None

    def put(self, message: Submit) -> None:
        """Takes a request. Raises Unavailable where too many grammars wait."""
        asked = tuple(getattr(message.request.sampling, name) for name in SHAPES)
        with self._changed:
            if asked not in self._waiting and len(self._waiting) >= MOST_GRAMMARS:
                raise Unavailable(
                    f"the queue of grammars is full: {MOST_GRAMMARS} wait to be compiled; try again later"
                )
            self._waiting.setdefault(asked, {})[message.request.number] = message
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def cancel(self, number: int, reason: str) -> bool:
        """Ends a request that waits here; returns whether it did."""
        with self._changed:
            found = any(each.pop(number, None) for each in self._waiting.values())
        if found:
            self._end(number, reason)
        return found

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                asked, requests = next(iter(self._waiting.items()))
                first = next(iter(requests.values()), None)
            refusal = None if first is None else self._compile(first)
            while self._hand_on(asked, refusal):
                pass

    def _compile(self, message: Submit) -> TesseraError | None:
        sampling = message.request.sampling
        try:
            if not self._engine.has_grammar(sampling):
                self._engine.compile(sampling, self._trial.check(sampling))
        except TesseraError as error:
            return error
        except Exception:
            _LOG.exception("a grammar could not be compiled")
            return Unavailable("what the answer must match could not be compiled; the server's log says why")
        return None

    def _hand_on(self, asked: Any, refusal: TesseraError | None) -> bool:
        """The next of those that wait for this grammar; False when there is none."""
        with self._changed:
            message = next(iter(self._waiting[asked].values()), None)
            if message is None:
                del self._waiting[asked]
                return False
        refusal = refusal or self._compile(message)  # enough copies were made of the one that there was
        with self._changed:  # a cancellation finds it here, or in the engine
            number, deadline = message.request.number, message.request.deadline_ns
            if self._waiting[asked].pop(number, None) is None:
                return True
            late = deadline is not None and deadline <= time.monotonic_ns()
            if not late and refusal is None:
                self._submit(message)
        if late:
            self._end(number, "deadline")
        elif refusal is not None:
            self._refuse(number, refusal)
        return True

    def _end(self, number: int, reason: str) -> None:
        self._refuse(number, None)
        self._tell(Progress(ends=[End(number, reason)]))
