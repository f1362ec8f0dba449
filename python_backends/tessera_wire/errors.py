"""What can go wrong when talking to a Tessera server, as one tree.

::

    TesseraClientError
    ├── ConnectionFailed    nobody answers at the address, or the line broke            (retried)
    ├── Unavailable         the server cannot take the request now: queue full, stopping (retried)
    ├── InvalidRequest      the request itself is wrong; sending it again will not help
    ├── DeadlineExceeded    the time given to the request ran out
    ├── Cancelled           the request was cancelled, by this side or by the server
    ├── ServerError         the server failed at its own work
    └── ProtocolError       the answer is not what this client understands

Foreign exceptions (gRPC's, httpx's) never leave the transports: they are mapped to this tree at
the edge. ``error.message`` keeps the server's own words, without the prefixes that tritonserver adds on the way
(``in ensemble 'vlm', ``, ``[request id: 17] ``); ``error.remedy``, where known, says what to do about it.
"""

from __future__ import annotations

import re


class TesseraClientError(Exception):
    """Base of everything this package raises on purpose.

    ``message`` is the fault in the server's (or the transport's) words, ``remedy`` a sentence on what to do or an
    empty string, ``code`` the status name the server gave (``"UNAVAILABLE"``, ...) or an empty string.
    ``server`` is the address of the server that was asked, where one was.
    """

    server: str | None = None

    def __init__(self, message: str, remedy: str = "", code: str = "") -> None:
        super().__init__(f"{message} ({remedy})" if remedy else message)
        self.message = message
        self.remedy = remedy
        self.code = code


class ConnectionFailed(TesseraClientError):
    """Nobody answers at the address, or the connection broke under the request."""


class InvalidRequest(TesseraClientError):
    """The request is wrong: an unknown option, a value out of range, a picture that is none, an unknown model."""


class Unavailable(TesseraClientError):
    """The server is there but cannot take this request now; a later attempt may succeed."""


class DeadlineExceeded(TesseraClientError):
    """The request's time ran out, here or on the server."""


class Cancelled(TesseraClientError):
    """The request was cancelled before it was complete."""


class ServerError(TesseraClientError):
    """The server failed while working on the request."""


class ProtocolError(TesseraClientError):
    """The server's answer does not follow the contract: another model, another version, or no Tessera at all."""


_PREFIXES = re.compile(r"^(?:in ensemble '[^']*', *|\[request id: [^\]]*\] *)+")
_TRACE = re.compile(r"\s*\n\s*At:\n.*", re.DOTALL)
_STATUS = re.compile(r"^([A-Z]+(?:_[A-Z]+)*): ")
_BUSY_REMEDY = "the server is busy: lower the concurrency or try again later"
_SLOW_REMEDY = "give a longer timeout or lower the load"

_MEMORY_REMEDY = "the server's /dev/shm is full: enlarge it (docker run --shm-size), or lower the concurrency"
_RESTART_REMEDY = "a stage died: `tessera serve` restarts it; a server started by hand must be restarted"

# What tritonserver and its Python processes say when their shared memory cannot grow.
NO_SHARED_MEMORY = "increase the shared memory pool size|grown shared memory region"

# Recognised by their words, whatever status came with them: a dead stage, say, is reported as INTERNAL although
# another attempt may find it restarted.
_BY_WORDS: tuple[tuple[str, type[TesseraClientError], str], ...] = (
    ("deadline exceeded|request timeout expired", DeadlineExceeded, _SLOW_REMEDY),
    (NO_SHARED_MEMORY, Unavailable, _MEMORY_REMEDY),
    ("stub process .* is not healthy", Unavailable, _RESTART_REMEDY),
    ("exceeds maximum queue size", Unavailable, _BUSY_REMEDY),
    ("server is stopping|stopped accepting new inference requests", Unavailable, "the server is shutting down"),
    (r"^(the )?(request )?(was )?cancell?ed\b", Cancelled, ""),
    ("request for unknown model", InvalidRequest, "see `tessera status` for the models this server has"),
    ("generate expects model to produce exactly 1 response", ProtocolError, "it answers in several: use stream()"),
)

# Only asked when no status came along: gRPC streams give none, the generate endpoints answer each fault with 400.
_WITHOUT_STATUS: tuple[tuple[str, type[TesseraClientError], str], ...] = (
    ("try(ing)? again|queue is full|too many requests|in flight", Unavailable, _BUSY_REMEDY),
    ("^failed to (?!parse)|out of memory|server's log says why|^unexpected deadlock", ServerError, ""),
)

_BY_CODE: dict[str, tuple[type[TesseraClientError], str]] = {
    **dict.fromkeys(("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"), (InvalidRequest, "")),
    **dict.fromkeys(("NOT_FOUND", "ALREADY_EXISTS"), (InvalidRequest, "")),
    **dict.fromkeys(("INTERNAL", "UNKNOWN"), (ServerError, "")),
    **dict.fromkeys(("UNAVAILABLE", "RESOURCE_EXHAUSTED"), (Unavailable, _BUSY_REMEDY)),
    "DEADLINE_EXCEEDED": (DeadlineExceeded, _SLOW_REMEDY),
    "CANCELLED": (Cancelled, ""),
    "UNIMPLEMENTED": (ProtocolError, "is this a Tessera server, and the address its gRPC port (8001)?"),
}


def clean(message: str) -> str:
    """The server's message without tritonserver's prefixes and without a Python traceback's file names."""
    return _TRACE.sub("", _PREFIXES.sub("", message.strip())).strip()


def from_server(message: str, code: str = "") -> TesseraClientError:
    """The error for a fault reported by the server.

    Args:
        message: the server's text, prefixes and all. A status name in front (``UNAVAILABLE: ...``) is the code,
            whatever came with the message: a front that relays an error may have lost its status.
        code: the gRPC status name that came with it; empty where the endpoint gives none.
    """
    text = clean(message) or "the server gave no reason"
    if (status := _STATUS.match(text)) and status[1] in _BY_CODE:
        code, text = status[1], text[status.end() :]
    for pattern, kind, remedy in _BY_WORDS if code else _BY_WORDS + _WITHOUT_STATUS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind(text, remedy, code)
    kind, remedy = _BY_CODE.get(code, (ServerError, "")) if code else (InvalidRequest, "")
    return kind(text, remedy, code)


def connection_failed(url: str, detail: str) -> ConnectionFailed:
    """The error for a server that does not answer at ``url``."""
    remedy = "is the server running there? `tessera serve` starts one"
    return ConnectionFailed(f"no connection to {url}: {detail}", remedy, "UNAVAILABLE")
