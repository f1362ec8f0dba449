"""Sender threads: a send is a slow handshake, so neither it nor a slow client may hold the engine's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tessera.tritonserver.failures import log_exception

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """One request's items in order. While a send is under way the next items gather and go out together."""

    def __init__(self, deliver: Callable[[list[Item]], Any]) -> None:
        self.deliver = deliver
        self.lock = threading.Lock()
        self.pending: list[Item] = []
        self.busy = False


class Outbox:
    """A few threads that deliver what is posted to channels; each channel is served by one thread at a time."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Channel[Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-send-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, channel: Channel[Item], item: Item) -> None:
        """Adds an item."""
        with channel.lock:
            channel.pending.append(item)
            if channel.busy:
                return
            channel.busy = True
        self._queue.put(channel)

    def close(self) -> None:
        """Delivers what was posted, then ends the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (channel := self._queue.get()) is not None:
            while True:
                with channel.lock:
                    items, channel.pending = channel.pending, []
                    if not items:
                        channel.busy = False
                        break
                try:
                    channel.deliver(items)
                except Exception as error:
                    log_exception(self._name, error)
