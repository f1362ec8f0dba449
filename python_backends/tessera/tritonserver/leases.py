"""Ends the work of clients that vanished, also behind the ensemble.

A step of an ensemble that has begun is never told that its client has gone; a request to a stage itself is. So a client
may hold one request open at the language model, its *lease*, and name it in the parameter `tessera-lease` of whatever
else it asks. When the connection that bears the lease breaks, what names it is cancelled. A client that is merely slow,
or stopped for a while, keeps its connection, and with it its work; nothing here goes by a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tessera.errors import InvalidRequest
from tessera.tritonserver.responder import Responder

WATCH_SECONDS = 0.2
WATCHING_PART = 10  # however many leases there are, looking at them takes at most this part of a thread's time
# A request may still be on its way from an earlier stage when its client is found gone, and be told nothing of it.
CANCEL_AGAIN_SECONDS = 5.0


class Leases:
    """The leases that are held; one thread watches their clients.

    ``cancel`` is called with a lease's name to end all that names it, perhaps several times.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._held: dict[str, Responder] = {}
        self._broken: dict[str, float] = {}  # until when what names it is cancelled again
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="leases", daemon=True)
        self._watcher.start()

    def open(self, name: str, responder: Responder) -> None:
        """Keeps a request open as the lease of this name. Raises InvalidRequest."""
        with self._changed:
            if not name:
                raise InvalidRequest("LEASE is empty; it names the lease")
            if name in self._held:
                raise InvalidRequest(f"the lease {name!r:.80} is held already; choose names at random")
            self._held[name] = responder
            self._changed.notify()

    def close(self, name: str) -> None:
        """Ends the lease of this name, if there is one."""
        with self._changed:
            responder = self._held.pop(name, None)
        if responder is not None:
            responder.finish()

    def stop(self) -> None:
        """Ends all leases."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._watcher.join()
        for name in list(self._held):
            self.close(name)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._broken or self._stopping.is_set())
                held = list(self._held.items())
            if self._stopping.is_set():
                return
            began = time.monotonic()
            for name, responder in held:
                if responder.is_cancelled():
                    self._broken[name] = began + CANCEL_AGAIN_SECONDS
                    self.close(name)
            for name, until in list(self._broken.items()):
                self._cancel(name)
                if until <= began:
                    del self._broken[name]
            self._stopping.wait(max(WATCH_SECONDS, WATCHING_PART * (time.monotonic() - began)))
