"""Sender threads: a send is a slow handshake, so neither it nor a slow client may hold the engine's thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tessera.tritonserver.failures import log_exception

Item = TypeVar("Item")

MOST_HELD = 8


class Channel(Generic[Item]):
    """One request's items in order, and whether those pending should go now."""

    def __init__(self, deliver: Callable[[list[Item]], Any]) -> None:
        self.deliver = deliver
        self.lock = threading.Lock()
        self.pending: list[Item] = []
        self.due = False
        self.busy = False


class Outbox:
    """A few threads that deliver what is posted to channels; each channel is served by one thread at a time.

    What is posted with ``hold_s`` gathers: until that many seconds have passed, MOST_HELD items are together, or
    something is posted that cannot wait. All of an outbox's finite holds must be equally long.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._ready: queue.SimpleQueue[Channel[Any] | None] = queue.SimpleQueue()
        self._held: queue.SimpleQueue[tuple[float, Channel[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-send-{i}", daemon=True) for i in range(threads)
        ]
        self._clock = threading.Thread(target=self._watch_the_clock, name=f"{name}-hold", daemon=True)
        for thread in (*self._threads, self._clock):
            thread.start()

    def post(self, channel: Channel[Item], item: Item, hold_s: float | None = 0.0) -> None:
        """Adds an item that may wait for ``hold_s`` seconds; None: until one is posted that may not wait so long."""
        with channel.lock:
            channel.pending.append(item)
            if hold_s == 0 or (hold_s is not None and len(channel.pending) >= MOST_HELD):
                self._make_due(channel)
            elif hold_s is not None and len(channel.pending) == 1:
                self._held.put((time.monotonic() + hold_s, channel))

    def close(self) -> None:
        """Delivers what was posted and may go, then ends the threads."""
        self._held.put(None)
        self._clock.join()
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _make_due(self, channel: Channel[Any]) -> None:
        """Call it under the channel's lock."""
        channel.due = True
        if not channel.busy:
            channel.busy = True
            self._ready.put(channel)

    def _watch_the_clock(self) -> None:
        while (entry := self._held.get()) is not None:  # in the order of their times, as all holds are equally long
            moment, channel = entry
            time.sleep(max(0.0, moment - time.monotonic()))
            with channel.lock:
                if channel.pending:
                    self._make_due(channel)

    def _run(self) -> None:
        while (channel := self._ready.get()) is not None:
            while True:
                with channel.lock:
                    if not channel.due or not channel.pending:
                        channel.busy = channel.due = False
                        break
                    items, channel.pending, channel.due = channel.pending, [], False
                try:
                    channel.deliver(items)
                except Exception as error:
                    log_exception(self._name, error)
