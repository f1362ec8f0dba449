"""Ends the work of clients that vanished, also behind the ensemble.

A step of an ensemble that has begun, or waits for its stage, is never told that its client has gone; a request to a
stage itself is. So a client may hold one request open at the language model, its *lease*, and name it in the parameter
`tessera-lease` of whatever else it asks, alone or with others, a space between. When the connection that bears the
lease breaks, what names it is cancelled. A client that is merely slow, or stopped for a while, keeps its connection,
and with it its work; nothing here goes by a clock.

The earlier stages are told by an empty file, named by the lease, in a folder that the stages of one server share. They
look before they work on a request: else one that comes now would wait until all pictures of the dead are encoded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tessera.errors import InvalidRequest
from tessera.tritonserver.responder import Responder, Watcher

WATCH_SECONDS = 0.2
TOLD_SECONDS = 600.0  # longer than a request waits for an earlier stage


FOLDER = f"/dev/shm/tessera-leases-{os.getppid()}"
"""The stages are tritonserver's children. The launcher's guard removes it, by this name, after a kill."""


def is_over(names: str) -> bool:
    """Whether what names these leases is cancelled: one of them is over."""
    return any(os.path.exists(_file(name)) for name in names.split())


def _file(name: str) -> str:
    return f"{FOLDER}/{hashlib.sha256(name.encode()).hexdigest()}"


class Leases:
    """The leases that are held; one thread watches their clients.

    ``cancel`` is called with a lease's name to end what names it and has come already; what comes later finds
    :func:`is_over`.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._held: dict[str, Responder] = {}
        self._told: dict[str, float] = {}  # when each file was made, the oldest first
        self._lock = threading.Lock()
        os.makedirs(FOLDER, mode=0o700, exist_ok=True)
        self._clients = Watcher("leases", WATCH_SECONDS, self.end)

    def open(self, name: str, responder: Responder) -> None:
        """Keeps a request open as the lease of this name. Raises InvalidRequest."""
        if len(name.split()) != 1:
            raise InvalidRequest(f"LEASE is {name!r:.80}; it must be one name, without spaces")
        with self._lock:
            if name in self._held:
                raise InvalidRequest(f"the lease {name!r:.80} is held already; choose names at random")
            self._held[name] = responder
            self._clients.watch(responder, name)

    def end(self, name: str) -> None:
        """Cancels what names this lease, held or not, and ends it."""
        with self._lock:
            responder = self._held.pop(name, None)
            self._tell(_file(name))
        self._cancel(name)
        if responder is not None:
            self._clients.forget(responder)
            responder.finish()

    def stop(self) -> None:
        """Ends all leases."""
        self._clients.close()
        for responder in self._held.values():
            responder.finish()
        shutil.rmtree(FOLDER, ignore_errors=True)

    def _tell(self, file: str) -> None:
        now = time.monotonic()
        with suppress(OSError):  # of a full /dev/shm: what is at an earlier stage goes on to its deadline
            open(file, "wb").close()
            self._told.setdefault(file, now)
            for old in [each for each, when in self._told.items() if when < now - TOLD_SECONDS]:
                del self._told[old]
                os.unlink(old)
