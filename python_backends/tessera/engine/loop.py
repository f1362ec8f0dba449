"""Steps an engine for as long as it runs, whatever a step does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tessera.engine.engine import Engine
from tessera.engine.progress import Progress
from tessera.lost_device import end_process_if_lost

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS = 5.0


class StepLoop:
    """Steps ``engine`` while it has work and gives what came of each step to ``tell``, which must be quick.

    A step that raises ends the requests it may have seen with reason "error"; those that come after are served. If it
    cost the GPU, the process ends. Other threads submit and cancel at the engine and then :meth:`wake` the loop.
    """

    def __init__(self, engine: Engine, tell: Callable[[Progress], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._wake = threading.Event()
        self._stopping = False

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Lets :meth:`run` end all requests with reason "error" and return."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Returns after :meth:`stop`; nothing is told afterwards."""
        checked = False
        while not self._stopping:
            self._wake.clear()  # before looking, so that whatever comes later wakes us
            if self._engine.has_work():
                self._tell(self._step())
                checked = False
            elif not self._wake.wait(None if checked else _IDLE_SECONDS):
                self._check_books()
                checked = True
        self._tell(self._engine.close("the language model is stopping"))

    def _step(self) -> Progress:
        try:
            return self._engine.step()
        except Exception:
            _LOG.exception("a step of the language model failed")
            end_process_if_lost()
            return self._engine.fail_all("a step failed; the server's log says why")

    def _check_books(self) -> None:
        """Idle is the time to look for leaked blocks; books found wrong are begun again."""
        try:
            self._engine.scheduler.check()
        except AssertionError:
            _LOG.exception("the books of the key/value cache were wrong and are begun again")
            self._tell(self._engine.fail_all("the key/value cache had to be cleared"))
