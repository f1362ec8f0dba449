"""The threads around an engine: one steps it, one makes text of what came of the steps."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from tessera.engine.engine import Engine
from tessera.engine.progress import Gatherer, Progress
from tessera.engine.request import Request, TokenEvent
from tessera.engine.sequence import Sequence
from tessera.lost_device import end_process_if_lost

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS = 5.0

OnProgress = Callable[[list[Progress]], None]
OnEvents = Callable[[list[TokenEvent]], None]


class StepThread:
    """Steps ``engine`` while it has work and gives what came of each step to ``on_progress``, which must be quick.

    A step that raises ends the requests it may have seen with reason "error"; those that come after are served. If it
    cost the GPU, the process ends.
    """

    def __init__(self, engine: Engine, on_progress: OnProgress) -> None:
        self.engine = engine
        self._on_progress = on_progress
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests with reason "error" and waits for the thread; no progress comes afterwards."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request) -> Sequence:
        """As Engine.submit; its progress may come before this returns."""
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
                self._on_progress(self._advance())
                checked = False
            elif not self._wake.wait(None if checked else _IDLE_SECONDS):
                self._check_books()
                checked = True
        self._on_progress(self.engine.close("the language model is stopping"))

    def _advance(self) -> list[Progress]:
        try:
            return self.engine.advance()
        except Exception:
            _LOG.exception("a step of the language model failed")
            end_process_if_lost()
            return self.engine.fail_all("a step failed; the server's log says why")

    def _check_books(self) -> None:
        """Idle is the time to look for leaked blocks; books found wrong are begun anew."""
        try:
            self.engine.scheduler.check()
        except AssertionError:
            _LOG.exception("the books of the key/value cache were wrong and are begun anew")
            self._on_progress(self.engine.fail_all("the key/value cache had to be cleared"))


class TextThread:
    """Gathers what steps did, makes events of it by ``render`` and gives them to ``on_events``, which must be quick."""

    def __init__(self, render: Callable[[list[Progress]], list[TokenEvent]], on_events: OnEvents) -> None:
        self._render = render
        self._on_events = on_events
        self._progress: queue.SimpleQueue[list[Progress] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-text", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, steps: list[Progress]) -> None:
        self._progress.put(steps)

    def stop(self) -> None:
        """Delivers what was put before, and waits for the thread."""
        if self._thread.is_alive():
            self._progress.put(None)
            self._thread.join()

    def _run(self) -> None:
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
            self._on_events(self._render(progress))
        except Exception:
            _LOG.exception("delivering %d events failed", len(progress))


class EngineLoop:
    """Both threads on one engine; ``on_progress`` hears of each step before text is made of it."""

    def __init__(self, engine: Engine, on_events: OnEvents, on_progress: OnProgress = lambda steps: None) -> None:
        self.engine = engine
        self._on_progress = on_progress
        self._steps = StepThread(engine, self._pass_on)
        self._text = TextThread(engine.render, on_events)
        self.submit = self._steps.submit
        self.abort = self._steps.abort

    def start(self) -> None:
        self._text.start()
        self._steps.start()

    def stop(self) -> None:
        """Ends all requests with reason "error" and waits for the threads; no event comes afterwards."""
        self._steps.stop()
        self._text.stop()

    def _pass_on(self, steps: list[Progress]) -> None:
        self._on_progress(steps)
        self._text.put(steps)
