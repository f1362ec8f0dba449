"""One request's way back to its client, walled off from two hazards of this server.

Asking a response sender ``is_cancelled()`` after its FINAL flag was sent crashes the whole server, and a request
that never gets FINAL hangs its client; so a responder knows whether it is closed, under a lock, and closes once.
"""

from __future__ import annotations

import threading
from typing import Any


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
            self._sender.send(*response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            return True
