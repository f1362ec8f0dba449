"""One request's way back to its client, walled off from three hazards of this server.

Asking a response sender ``is_cancelled()`` after its FINAL flag was sent crashes the whole server, and a request
that never gets FINAL hangs its client; so a responder knows whether it is closed, under a lock, and closes once.

A response for which there is no shared memory is not sent. If it was not the last one, an error takes its place, for
an answer must not go on without a part of itself. If it was, the sender takes itself for closed: nothing can answer
that request any more. Only the end of this process does, which the launcher notices; the new one's memory has room.

A client that leaves is noticed by asking: :class:`Watcher`.

Sender threads: a send is a slow handshake, so neither it nor a slow client may hold the engine's thread.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from tessera.errors import Unavailable
from tessera.tritonserver import backend
from tessera.tritonserver.failures import error_response, log_exception
from tessera_wire.errors import NO_SHARED_MEMORY

NO_MEMORY = Unavailable("the server has no shared memory left for the next part of this answer")


class Responder:
    """Sends responses of one request and never touches its sender again after the last one."""

    def __init__(self, request: Any) -> None:
        self.request_id: str = request.request_id()
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, response: Any, final: bool) -> bool:
        """Sends one response; returns False, and sends nothing, if the last one has gone already."""
        return self._send(response, final=final)

    def finish(self) -> bool:
        """Ends a decoupled request without a further response; returns False if it had ended already."""
        return self._send(final=True)

    def is_cancelled(self) -> bool:
        """Whether the client went away; False once the last response was sent."""
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def _send(self, *response: Any, final: bool) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._closed = final
            flag = backend().TRITONSERVER_RESPONSE_COMPLETE_FINAL
            try:
                self._sender.send(*response, flags=flag if final else 0)
            except Exception as error:
                if not is_want_of_memory(error):
                    raise
                if final:
                    end_process(error)
                self._closed = True
                try:
                    self._sender.send(error_response("", NO_MEMORY), flags=flag)
                except Exception as again:
                    end_process(again)
            return True


def is_want_of_memory(error: Exception) -> bool:
    return re.search(NO_SHARED_MEMORY, str(error)) is not None


def end_process(error: Exception) -> NoReturn:
    # No logger: what a stage logs travels through the server, and may not arrive before the end.
    os.write(2, f"an answer is lost for want of shared memory to process {os.getpid()}, which ends: {error}\n".encode())
    os._exit(1)


WATCHING_PART = 10  # however many requests there are, asking for them takes at most this part of a thread's time


class Watcher:
    """Asks of each request that it is given, every so often, whether its client has left; ``left`` is then told once
    what goes with the request. One thread, ended by close()."""

    def __init__(self, name: str, seconds: float, left: Callable[[str], Any]) -> None:
        self._seconds, self._left = seconds, left
        self._watched: dict[Responder, str] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, responder: Responder, what: str) -> None:
        with self._changed:
            self._watched[responder] = what
            self._changed.notify()

    def forget(self, responder: Responder) -> None:
        """Harmless where it is not watched."""
        with self._changed:
            self._watched.pop(responder, None)

    def close(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopping.is_set())
                watched = list(self._watched.items())
            began = time.monotonic()
            for responder, what in watched:
                if responder.is_cancelled():
                    self.forget(responder)
                    self._left(what)
            self._stopping.wait(max(self._seconds, WATCHING_PART * (time.monotonic() - began)))


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
