"""The HTTP transport, on the standard library alone.

A whole answer goes through ``vlm_unary``'s infer endpoint (raw bytes, true status codes), a stream through ``vlm``'s
generate_stream (JSON and server-sent events; this endpoint answers every fault with 400, so errors are told apart
by their words). Connections are kept alive and reused; http.client sets TCP_NODELAY on them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tessera_client import errors, wire
from tessera_client.messages import Delta, Models, ModelStatus, Request, ServerStatus
from tessera_client.transport import CONTROL_SECONDS

LENGTH_HEADER = "Inference-Header-Content-Length"
IDLE_SECONDS = 2.0  # a connection unused for longer may have been closed by the server: not reused

_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    413: "INVALID_ARGUMENT",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
}


class _Pool:
    """Idle keep-alive connections to one server."""

    def __init__(self, address: str, tls: bool) -> None:
        self.address = address
        self._kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if time.monotonic() - since < IDLE_SECONDS:
                    return connection, True
                connection.close()
        return self._kind(self.address), False

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        with self._lock:
            for _, connection in self._idle:
                connection.close()
            self._idle.clear()


class _Exchange:
    """One HTTP request and its response, with a deadline and foreign errors mapped."""

    def __init__(
        self, pool: _Pool, method: str, path: str, body: bytes, headers: dict[str, str], timeout: float | None
    ) -> None:
        self._pool = pool
        self._args = (method, path, body, headers)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._connection: http.client.HTTPConnection | None = None
        self._cancelled = False
        self._response: http.client.HTTPResponse | None = None

    def response(self) -> http.client.HTTPResponse:
        """Sends the request and reads the response's head."""
        while True:
            self._connection, reused = self._pool.take()
            try:
                if self._connection.sock is None:
                    self._connection.timeout = self._remaining()
                    self._connection.connect()
                self._limit()
                self._connection.request(*self._args)
                self._response = self._connection.getresponse()
                return self._response
            except (http.client.HTTPException, OSError) as error:
                self._drop()
                stale = reused and isinstance(error, (http.client.BadStatusLine, ConnectionError))
                if not stale or self._cancelled:
                    raise self._error(error) from error

    def lines(self) -> Iterator[bytes]:
        assert self._response is not None
        while line := self._read(self._response.readline):
            yield line
        self._finish()

    def body(self) -> bytes:
        assert self._response is not None
        data = self._read(self._response.read)
        self._finish()
        return data

    def cancel(self) -> None:
        """Breaks the connection off; a thread blocked on it wakes with Cancelled."""
        self._cancelled = True
        sock = self._connection.sock if self._connection else None
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _read(self, read: Any) -> bytes:
        try:
            self._limit()
            return read()
        except (http.client.HTTPException, OSError, ValueError) as error:
            self._drop()
            raise self._error(error) from error

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _limit(self) -> None:
        sock = self._connection.sock if self._connection else None
        if sock is not None:
            sock.settimeout(self._remaining())

    def _finish(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not self._cancelled and connection.sock is not None:
            self._pool.give_back(connection)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _error(self, error: Exception) -> errors.TesseraClientError:
        if self._cancelled:
            return errors.Cancelled("the request was cancelled by this client")
        if isinstance(error, TimeoutError):
            return errors.DeadlineExceeded("the time given ran out before the answer was complete")
        return errors.connection_failed(self._pool.address, str(error) or type(error).__name__)


class HttpTransport:
    """HTTP for threads."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._pool = _Pool(address, tls)
        self._models = models

    def send(self, request: Request, request_id: str, timeout: float | None) -> _HttpResponses:
        if request.stream:
            body = json.dumps(wire.request_json(request, request_id)).encode()
            path = f"/v2/models/{self._models.vlm}/generate_stream"
            exchange = _Exchange(self._pool, "POST", path, body, {"Content-Type": "application/json"}, timeout)
            return _HttpResponses(exchange, _events(exchange))
        body, headers = _infer_body(request, request_id, timeout)
        exchange = _Exchange(self._pool, "POST", f"/v2/models/{self._models.unary}/infer", body, headers, timeout)
        return _HttpResponses(exchange, _whole(exchange))

    def cancel(self, request_id: str) -> None:
        body = json.dumps({"CANCEL": request_id}).encode()
        path = f"/v2/models/{self._models.language_model}/generate_stream"
        self._ask("POST", path, body)

    def status(self) -> ServerStatus:
        ready = self._exchange("GET", "/v2/health/ready")
        is_ready = ready.response().status == 200
        ready.body()
        metadata, index = self._ask("GET", "/v2"), self._ask("POST", "/v2/repository/index")
        try:
            models = tuple(
                ModelStatus(m["name"], m.get("version", ""), m.get("state", ""), m.get("reason", ""))
                for m in json.loads(index)
            )
            return ServerStatus(is_ready, json.loads(metadata)["version"], models)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise errors.ProtocolError(
                "what answers here is no tritonserver", "is the address its HTTP port?"
            ) from error

    def close(self) -> None:
        self._pool.close()

    def _exchange(self, method: str, path: str, body: bytes = b"") -> _Exchange:
        return _Exchange(self._pool, method, path, body, {"Content-Type": "application/json"}, CONTROL_SECONDS)

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        exchange = self._exchange(method, path, body)
        status = exchange.response().status
        data = exchange.body()
        if status != 200:
            raise errors.from_server(_error_text(data), _CODES.get(status, "INTERNAL"))
        return data


class _HttpResponses:
    def __init__(self, exchange: _Exchange, deltas: Iterator[Delta]) -> None:
        self._exchange = exchange
        self._deltas = deltas

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def cancel(self) -> None:
        self._exchange.cancel()


def _events(exchange: _Exchange) -> Iterator[Delta]:
    """The deltas of a generate_stream response."""
    response = exchange.response()
    if response.status != 200:
        text = _error_text(exchange.body())
        # 400 stands for every fault here; any other status is true.
        raise errors.from_server(text, "" if response.status == 400 else _CODES.get(response.status, "INTERNAL"))
    for line in exchange.lines():
        if line.startswith(b"data:"):
            event = _json(line[5:])
            if "error" in event:
                exchange.cancel()
                raise errors.from_server(str(event["error"]))
            yield wire.delta_from_json(event)


def _whole(exchange: _Exchange) -> Iterator[Delta]:
    """The one delta of an infer response (JSON head, then the outputs' raw contents)."""
    response = exchange.response()
    data = exchange.body()
    if response.status != 200:
        raise errors.from_server(_error_text(data), _CODES.get(response.status, "INTERNAL"))
    head_length = int(response.getheader(LENGTH_HEADER) or len(data))
    position = head_length
    outputs: list[tuple[str, bytes]] = []
    for output in _json(data[:head_length]).get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size", 0)
        outputs.append((output["name"], data[position : position + size]))
        position += size
    yield wire.delta_from_raw(outputs)


def _infer_body(request: Request, request_id: str, timeout: float | None) -> tuple[bytes, dict[str, str]]:
    tensors = wire.request_tensors(request)
    parameters: dict[str, Any] = {"binary_data_output": True}
    if timeout is not None:
        parameters["timeout"] = max(1, int(timeout * 1e6))
    head = json.dumps(
        {
            "id": request_id,
            "parameters": parameters,
            "inputs": [
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.shape,
                    "parameters": {"binary_data_size": len(tensor.data)},
                }
                for tensor in tensors
            ],
        }
    ).encode()
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}
    return b"".join((head, *(tensor.data for tensor in tensors))), headers


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.ProtocolError(f"the server sent no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise errors.ProtocolError(f"the server sent no JSON object: {data[:80]!r}")
    return value


def _error_text(data: bytes) -> str:
    """The message in an error body, which may be JSON, an event holding JSON, or plain text."""
    text = data.decode("utf-8", "replace").strip()
    try:
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text


class AsyncHttpTransport:
    """HTTP for asyncio: the blocking transport in threads."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport

    def send(self, request: Request, request_id: str, timeout: float | None) -> _AsyncHttpResponses:
        return _AsyncHttpResponses(self._transport.send(request, request_id, timeout))

    async def cancel(self, request_id: str) -> None:
        await asyncio.to_thread(self._transport.cancel, request_id)

    async def status(self) -> ServerStatus:
        return await asyncio.to_thread(self._transport.status)

    async def close(self) -> None:
        self._transport.close()


class _AsyncHttpResponses:
    def __init__(self, responses: _HttpResponses) -> None:
        self._responses = responses

    def __aiter__(self) -> _AsyncHttpResponses:
        return self

    async def __anext__(self) -> Delta:
        delta = await asyncio.to_thread(next, self._responses, None)  # StopIteration cannot cross a future
        if delta is None:
            raise StopAsyncIteration
        return delta

    def cancel(self) -> None:
        self._responses.cancel()
