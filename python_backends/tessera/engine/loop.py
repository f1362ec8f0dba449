"""The one thread that steps an engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from tessera.engine.engine import Engine
from tessera.engine.progress import Gatherer, Progress
from tessera.engine.request import Request, TokenEvent
from tessera.engine.sequence import Sequence

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS = 5.0


class EngineLoop:
    """Steps ``engine`` while it has work and gives each step's events to ``on_events``.

    Two threads: one plans, runs and applies; the other gathers what came of it and makes text and events, so that
    the first is back at the GPU in time. ``on_events`` must be quick. A step that raises
    ends the requests it may have seen with reason "error"; the loop goes on with those that come after.
    """

    def __init__(self, engine: Engine, on_events: Callable[[list[TokenEvent]], None]) -> None:
        self.engine = engine
        self._on_events = on_events
        self._wake = threading.Event()
        self._stopping = False
        self._progress: queue.SimpleQueue[list[Progress] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._renderer = threading.Thread(target=self._render, name="engine-text", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._renderer.start()

    def stop(self) -> None:
        """Ends all requests with reason "error" and waits for the thread; no event comes afterwards."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
            self._progress.put(None)
            self._renderer.join()

    def submit(self, request: Request) -> Sequence:
        """As Engine.submit; its events may come before this returns."""
        sequence = self.engine.submit(request)
        self._wake.set()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.engine.abort(sequence)
        self._wake.set()

    def _run(self) -> None:
        checked = False
        while not self._stopping:
            self._wake.clear()  # before looking, so that whatever comes later wakes us
            if self.engine.has_work():
                self._progress.put(self._advance())
                checked = False
            elif not self._wake.wait(None if checked else _IDLE_SECONDS):
                self._check_books()
                checked = True
        self._progress.put(self.engine.close("the language model is stopping"))

    def _advance(self) -> list[Progress]:
        try:
            return self.engine.advance()
        except Exception as error:
            _LOG.exception("a step of the language model failed")
            return self.engine.fail_all(f"a step of the language model failed: {type(error).__name__}: {error}")

    def _check_books(self) -> None:
        """Idle is the time to look for leaked blocks; books found wrong are begun anew."""
        try:
            self.engine.scheduler.check()
        except AssertionError:
            _LOG.exception("the books of the key/value cache were wrong and are begun anew")
            self._progress.put(self.engine.fail_all("the key/value cache had to be cleared"))

    def _render(self) -> None:
        gatherer = Gatherer()
        while True:
            try:
                steps = self._progress.get(timeout=gatherer.wait_s())
            except queue.Empty:
                steps = []
            if steps is None:
                return
            self._deliver(gatherer.add(steps))

    def _deliver(self, progress: list[Progress]) -> None:
        if not progress:
            return
        try:
            self._on_events(self.engine.render(progress))
        except Exception:
            _LOG.exception("delivering %d events failed", len(progress))
