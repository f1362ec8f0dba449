"""One request's way back to its client, walled off from three hazards of this server.

Asking a response sender ``is_cancelled()`` after its FINAL flag was sent crashes the whole server, and a request
that never gets FINAL hangs its client; so a responder knows whether it is closed, under a lock, and closes once.

A response for which there is no shared memory is not sent. If it was not the last one, an error takes its place, for
an answer must not go on without a part of itself. If it was, the sender takes itself for closed: nothing can answer
that request any more. Only the end of this process does, which the launcher notices; the new one's memory has room.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any, NoReturn

from tessera.errors import Unavailable
from tessera.tritonserver.failures import error_response
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
        import triton_python_backend_utils as pb_utils

        with self._lock:
            if self._closed:
                return False
            self._closed = final
            flag = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
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
