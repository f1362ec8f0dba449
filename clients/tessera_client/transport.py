"""The seam between the clients and the network, and its gRPC side; the only file that imports tritonclient.

A transport sends a :class:`~tessera_client.messages.Request` and gives back the running :class:`Responses`; all
it raises is of this package's error tree. Clients know nothing else of the network, so tests put a fake here. What a
client gets is always a pool of transports (see :mod:`tessera_client.pool`), one for each server's address.

Over gRPC all requests of a client share one ModelStreamInfer call (see :mod:`tessera_client.lines`), which is opened
by the first request and again after it broke. tritonserver reports a failed request on such a call by a message
without a status, so :func:`tessera_client.errors.from_server` goes by the words.
"""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from tessera_client import errors, wire
from tessera_client.lines import AsyncLine, AsyncLineResponses, Line, LineResponses
from tessera_client.messages import Delta, Models, ModelStatus, Request, ServerStatus
from tessera_client.pool import AsyncPooledTransport, PooledTransport

CONTROL_SECONDS = 3.0  # time given to status questions and to the request that cancels another


class Responses(Protocol):
    """A request under way: iterate over its deltas; ``cancel`` may be called from any thread."""

    def __iter__(self) -> Iterator[Delta]: ...
    def __next__(self) -> Delta: ...
    def cancel(self) -> None: ...


class Transport(Protocol):
    """What a client needs of the network. Thread-safe."""

    def send(self, request: Request, request_id: str, timeout: float | None) -> Responses:
        """Starts a request; it ends with DeadlineExceeded after ``timeout`` seconds."""
        ...

    def cancel(self, request_id: str) -> None:
        """Tells the language model to stop working on a request (a running ensemble notices nothing itself)."""
        ...

    def status(self) -> ServerStatus: ...
    def close(self) -> None: ...


class AsyncResponses(Protocol):
    """As :class:`Responses`, for ``async for``."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    async def __anext__(self) -> Delta: ...
    def cancel(self) -> None: ...


class AsyncTransport(Protocol):
    """As :class:`Transport`, for one event loop."""

    def send(self, request: Request, request_id: str, timeout: float | None) -> AsyncResponses: ...
    async def cancel(self, request_id: str) -> None: ...
    async def status(self) -> ServerStatus: ...
    async def close(self) -> None: ...


def open_transport(url: str | Sequence[str], models: Models) -> PooledTransport:
    """The transport for one or several servers (see :func:`addresses`), each ``host:port`` or ``grpc://`` (``grpcs://``:
    TLS), or ``http://`` / ``https://``."""
    return PooledTransport({each: _open(each, models) for each in addresses(url)})


def open_async_transport(url: str | Sequence[str], models: Models) -> AsyncPooledTransport:
    """As :func:`open_transport`; HTTP runs in threads."""
    return AsyncPooledTransport({each: _open_async(each, models) for each in addresses(url)})


def _open(url: str, models: Models) -> Transport:
    scheme, address = parse_url(url)
    if scheme.startswith("http"):
        from tessera_client.http_transport import HttpTransport

        return HttpTransport(address, models, tls=scheme == "https")
    return GrpcTransport(address, models, tls=scheme == "grpcs")


def _open_async(url: str, models: Models) -> AsyncTransport:
    scheme, address = parse_url(url)
    if scheme.startswith("http"):
        from tessera_client.http_transport import AsyncHttpTransport, HttpTransport

        return AsyncHttpTransport(HttpTransport(address, models, tls=scheme == "https"))
    return AsyncGrpcTransport(address, models, tls=scheme == "grpcs")


def addresses(url: str | Sequence[str]) -> list[str]:
    """The servers' addresses in a list or in a text with commas; the scheme of the first goes for those without."""
    given = url.split(",") if isinstance(url, str) else url if isinstance(url, (list, tuple)) else [url]
    found = [each.strip() if isinstance(each, str) else "" for each in given]
    scheme = found[0].partition("://")[0] if found and "://" in found[0] else "grpc"
    if not found or "" in found:
        raise errors.InvalidRequest(
            f"not server addresses: {url!r:.200}", "use host:port, or several with commas between"
        )
    return [each if "://" in each else f"{scheme}://{each}" for each in found]


def parse_url(url: str) -> tuple[str, str]:
    """``(scheme, "host:port")``; the ports default to tritonserver's, 8001 for gRPC and 8000 for HTTP."""
    remedy = "use host:port, grpc://host:port or http://host:port"
    try:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise errors.InvalidRequest(f"not a server address: {url!r:.200}: {error}", remedy) from None
    beside = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("grpc", "grpcs", "http", "https") or beside or not re.fullmatch(r"[\w.:%-]+", host, re.A):
        raise errors.InvalidRequest(f"not a server address: {url!r:.200}", remedy)
    host = f"[{host}]" if ":" in host else host
    return parts.scheme, f"{host}:{port or (8000 if parts.scheme.startswith('http') else 8001)}"


class _Grpc:
    """The calls used, built on a channel of grpc or of grpc.aio; and the messages they take."""

    def __init__(self, address: str, models: Models, tls: bool, aio: bool) -> None:
        try:
            import grpc.aio
            from tritonclient.grpc import service_pb2
        except (ImportError, RuntimeError) as error:
            raise errors.TesseraClientError(
                f"the gRPC transport needs tritonclient: {error}", "pip install 'tritonclient[grpc]', or use http://"
            ) from error
        self.address = address
        self.messages = service_pb2
        self.models = models
        self.rpc_error = grpc.RpcError
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_retries", 0),
            # A restarted server is found again at once, not after gRPC's default of up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        module: Any = grpc.aio if aio else grpc
        self.channel: Any = (
            module.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
            if tls
            else module.insecure_channel(address, options=options)
        )
        self.infer = self.channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    def questions(self) -> list[Any]:
        """The three calls of a status, to be made (or awaited) in turn."""
        return [
            self.channel.unary_unary(
                f"/inference.GRPCInferenceService/{name}",
                request_serializer=getattr(self.messages, f"{name}Request").SerializeToString,
                response_deserializer=getattr(self.messages, f"{name}Response").FromString,
            )(getattr(self.messages, f"{name}Request")(), timeout=CONTROL_SECONDS)
            for name in ("ServerReady", "ServerMetadata", "RepositoryIndex")
        ]

    def infer_message(self, model: str, request_id: str, tensors: list[wire.Tensor], timeout: float | None) -> Any:
        message = self.messages.ModelInferRequest(model_name=model, id=request_id)
        for tensor in tensors:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        if timeout is not None:
            message.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
        return message

    def cancel_message(self, control_id: str, request_id: str) -> Any:
        tensor = wire.bytes_tensor("CANCEL", request_id.encode())
        return self.infer_message(self.models.language_model, control_id, [tensor], None)

    def status(self, answers: list[Any]) -> ServerStatus:
        ready, metadata, index = answers
        models = tuple(ModelStatus(m.name, m.version, m.state, m.reason) for m in index.models)
        return ServerStatus(bool(ready.ready), metadata.version, models)

    def mapped(self, error: BaseException) -> errors.TesseraClientError:
        """grpc's error as ours. A call that carries many requests fails only when the connection does."""
        if not isinstance(error, self.rpc_error):
            return errors.Cancelled("the client was closed")
        call: Any = error
        code, details = call.code().name, call.details() or ""
        if code in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"):
            return errors.connection_failed(self.address, details)
        return errors.from_server(details, code)


def _delta(message: Any) -> Delta:
    if message.error_message:
        raise errors.from_server(message.error_message)
    response = message.infer_response
    return wire.delta_from_raw(zip((o.name for o in response.outputs), response.raw_output_contents, strict=False))


class GrpcTransport:
    """gRPC for threads."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._grpc = _Grpc(address, models, tls, aio=False)
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._closed = False

    def send(self, request: Request, request_id: str, timeout: float | None) -> _GrpcResponses:
        message = self._grpc.infer_message(self._grpc.models.vlm, request_id, wire.request_tensors(request), timeout)
        return _GrpcResponses(self._put(request_id, message, timeout))

    def cancel(self, request_id: str) -> None:
        control_id = f"cancel-{request_id}"
        message = self._grpc.cancel_message(control_id, request_id)
        for _ in _GrpcResponses(self._put(control_id, message, CONTROL_SECONDS)):
            pass

    def status(self) -> ServerStatus:
        try:
            return self._grpc.status(self._grpc.questions())
        except self._grpc.rpc_error as error:
            raise self._grpc.mapped(error) from error

    def close(self) -> None:
        """Cancels what is under way on the server, then lets the line end in order."""
        self._closed = True
        line, self._line = self._line, None
        if line is not None:
            for request_id in line.waiting():
                line.send(control := f"cancel-{request_id}", self._grpc.cancel_message(control, request_id), None)
            line.close(CONTROL_SECONDS)
        self._grpc.channel.close()

    def _put(self, request_id: str, message: Any, timeout: float | None) -> LineResponses:
        while True:
            with self._lock:
                if self._closed:
                    raise errors.TesseraClientError("this client is closed", "open a new one")
                if self._line is None:
                    self._line = Line(self._grpc.infer, self._grpc.mapped)
                line = self._line
            if (responses := line.send(request_id, message, timeout)) is not None:
                return responses
            with self._lock:
                if self._line is line:
                    self._line = None


class _GrpcResponses:
    def __init__(self, raw: LineResponses) -> None:
        self._raw = raw
        self.cancel = raw.cancel

    def __iter__(self) -> _GrpcResponses:
        return self

    def __next__(self) -> Delta:
        if (message := self._raw.next()) is None:
            raise StopIteration
        return _delta(message)


class AsyncGrpcTransport:
    """gRPC for asyncio. The channel is opened by the first use, inside the running event loop."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._open = lambda: _Grpc(address, models, tls, aio=True)
        self._opened: _Grpc | None = None
        self._line: AsyncLine | None = None
        self._closed = False

    @property
    def _grpc(self) -> _Grpc:
        if self._closed:
            raise errors.TesseraClientError("this client is closed", "open a new one")
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def send(self, request: Request, request_id: str, timeout: float | None) -> _AsyncGrpcResponses:
        message = self._grpc.infer_message(self._grpc.models.vlm, request_id, wire.request_tensors(request), timeout)
        return _AsyncGrpcResponses(self._put(request_id, message, timeout))

    async def cancel(self, request_id: str) -> None:
        control_id = f"cancel-{request_id}"
        message = self._grpc.cancel_message(control_id, request_id)
        async for _ in _AsyncGrpcResponses(self._put(control_id, message, CONTROL_SECONDS)):
            pass

    async def status(self) -> ServerStatus:
        grpc = self._grpc
        try:
            return grpc.status([await question for question in grpc.questions()])
        except grpc.rpc_error as error:
            raise grpc.mapped(error) from error

    async def close(self) -> None:
        """As :meth:`GrpcTransport.close`."""
        opened, line, self._line = self._opened, self._line, None
        if opened is not None and not self._closed:
            if line is not None:
                for request_id in line.waiting():
                    line.send(control := f"cancel-{request_id}", opened.cancel_message(control, request_id), None)
                await line.close(CONTROL_SECONDS)
            await opened.channel.close()
        self._closed = True

    def _put(self, request_id: str, message: Any, timeout: float | None) -> AsyncLineResponses:
        while True:
            if self._line is None:
                self._line = AsyncLine(self._grpc.infer, self._grpc.mapped)
            if (responses := self._line.send(request_id, message, timeout)) is not None:
                return responses
            self._line = None


class _AsyncGrpcResponses:
    def __init__(self, raw: AsyncLineResponses) -> None:
        self._raw = raw
        self.cancel = raw.cancel

    def __aiter__(self) -> _AsyncGrpcResponses:
        return self

    async def __anext__(self) -> Delta:
        if (message := await self._raw.next()) is None:
            raise StopAsyncIteration
        return _delta(message)
