"""The seam between the clients and the network, and its gRPC side; the only file that imports tritonclient.

A transport sends a :class:`~tessera_client.messages.Request` and gives back the running :class:`Responses`; all
it raises is of this package's error tree. Clients know nothing else of the network, so tests put a fake here.

Each gRPC request is a call of its own on ModelStreamInfer, all over one HTTP/2 connection: the call carries the
deadline, is cancelled alone, ends with a true status (header ``triton_grpc_error``) that touches no other request,
and grpcio reconnects by itself. Since one message goes up and many come down, the method is called as
unary-stream in the caller's thread, which spares grpcio's two helper threads a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tessera_client import errors, wire
from tessera_client.messages import Delta, Models, ModelStatus, Request, ServerStatus

if TYPE_CHECKING:
    import grpc

CONTROL_SECONDS = 5.0  # time given to status questions and to the request that cancels another
STRICT = (("triton_grpc_error", "true"),)


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


def open_transport(url: str, models: Models) -> Transport:
    """The transport for ``host:port`` or ``grpc://`` (``grpcs://``: TLS), or ``http://`` / ``https://``."""
    scheme, address = parse_url(url)
    if scheme.startswith("http"):
        from tessera_client.http_transport import HttpTransport

        return HttpTransport(address, models, tls=scheme == "https")
    return GrpcTransport(address, models, tls=scheme == "grpcs")


def open_async_transport(url: str, models: Models) -> AsyncTransport:
    """As :func:`open_transport`; HTTP runs in threads."""
    scheme, address = parse_url(url)
    if scheme.startswith("http"):
        from tessera_client.http_transport import AsyncHttpTransport, HttpTransport

        return AsyncHttpTransport(HttpTransport(address, models, tls=scheme == "https"))
    return AsyncGrpcTransport(address, models, tls=scheme == "grpcs")


def parse_url(url: str) -> tuple[str, str]:
    """``(scheme, "host:port")``; the ports default to tritonserver's, 8001 for gRPC and 8000 for HTTP."""
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    if parts.scheme not in ("grpc", "grpcs", "http", "https") or not parts.hostname or parts.path.strip("/"):
        raise errors.InvalidRequest(
            f"not a server address: {url!r}", "use host:port, grpc://host:port or http://host:port"
        )
    try:
        port = parts.port
    except ValueError as error:
        raise errors.InvalidRequest(f"not a server address: {url!r}: {error}") from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, f"{host}:{port or (8000 if parts.scheme.startswith('http') else 8001)}"


class _GrpcCalls:
    """The three calls used, built on a channel of grpc or of grpc.aio; and the messages they take."""

    def __init__(self, address: str, models: Models, tls: bool, aio: bool) -> None:
        try:
            import grpc
            from tritonclient.grpc import service_pb2
        except (ImportError, RuntimeError) as error:
            raise errors.TesseraClientError(
                f"the gRPC transport needs tritonclient: {error}", "pip install 'tritonclient[grpc]', or use http://"
            ) from error
        self.address = address
        self.messages = service_pb2
        self.models = models
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.enable_retries", 0),
            # A restarted server is found again at once, not after gRPC's default of up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if not aio:
            options.append((grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1))
        module: Any = grpc.aio if aio else grpc
        self.channel: Any = (
            module.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
            if tls
            else module.insecure_channel(address, options=options)
        )
        self.infer = self.channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        self.ready = self._question("ServerReady")
        self.metadata = self._question("ServerMetadata")
        self.index = self._question("RepositoryIndex")

    def _question(self, name: str) -> Any:
        return self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{name}",
            request_serializer=getattr(self.messages, f"{name}Request").SerializeToString,
            response_deserializer=getattr(self.messages, f"{name}Response").FromString,
        )

    def infer_message(self, model: str, request_id: str, tensors: list[wire.Tensor], timeout: float | None) -> Any:
        message = self.messages.ModelInferRequest(model_name=model, id=request_id)
        for tensor in tensors:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
        if timeout is not None:
            message.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
        return message

    def cancel_message(self, request_id: str) -> Any:
        tensor = wire.bytes_tensor("CANCEL", request_id.encode())
        return self.infer_message(self.models.language_model, "", [tensor], None)

    def status(self, ready: Any, metadata: Any, index: Any) -> ServerStatus:
        models = tuple(ModelStatus(m.name, m.version, m.state, m.reason) for m in index.models)
        return ServerStatus(bool(ready.ready), metadata.version, models)

    def error(self, error: grpc.RpcError) -> errors.TesseraClientError:
        """grpc's error as ours. What the peer did not say, grpcio says itself of the connection."""
        call: Any = error
        code, details = call.code(), call.details() or ""
        name = code.name if code is not None else ""
        if name == "DEADLINE_EXCEEDED":
            return errors.DeadlineExceeded("the time given ran out before the answer was complete", "", name)
        said_by_peer = "received from peer" in (call.debug_error_string() or "")
        if name in ("UNAVAILABLE", "INTERNAL", "UNKNOWN") and not said_by_peer:
            return errors.connection_failed(self.address, details)
        return errors.from_server(details, name)


def _delta(message: Any) -> Delta | None:
    """The delta in a ModelStreamInferResponse; None for an empty one, which only marks the end."""
    if message.error_message:
        raise errors.from_server(message.error_message)
    response = message.infer_response
    if not response.outputs:
        return None
    return wire.delta_from_raw(zip((o.name for o in response.outputs), response.raw_output_contents, strict=False))


class GrpcTransport:
    """gRPC for threads."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._calls = _GrpcCalls(address, models, tls, aio=False)

    def send(self, request: Request, request_id: str, timeout: float | None) -> _GrpcResponses:
        calls = self._calls
        message = calls.infer_message(calls.models.vlm, request_id, wire.request_tensors(request), timeout)
        return _GrpcResponses(calls, _checked(calls.infer, message, timeout))

    def cancel(self, request_id: str) -> None:
        call = _checked(self._calls.infer, self._calls.cancel_message(request_id), CONTROL_SECONDS)
        for _ in _GrpcResponses(self._calls, call):
            pass

    def status(self) -> ServerStatus:
        import grpc

        calls, m = self._calls, self._calls.messages
        try:
            ready = calls.ready(m.ServerReadyRequest(), timeout=CONTROL_SECONDS)
            metadata = calls.metadata(m.ServerMetadataRequest(), timeout=CONTROL_SECONDS)
            index = calls.index(m.RepositoryIndexRequest(), timeout=CONTROL_SECONDS)
        except grpc.RpcError as error:
            raise calls.error(error) from error
        return calls.status(ready, metadata, index)

    def close(self) -> None:
        self._calls.channel.close()


def _checked(infer: Any, message: Any, timeout: float | None) -> Any:
    try:
        return infer(message, timeout=timeout, metadata=STRICT)
    except ValueError as error:  # "Cannot invoke RPC on closed channel!"
        raise errors.TesseraClientError(f"the client is closed: {error}", "open a new Client") from error


class _GrpcResponses:
    def __init__(self, calls: _GrpcCalls, call: Any) -> None:
        import grpc

        self._calls = calls
        self._call = call
        self._rpc_error = grpc.RpcError

    def __iter__(self) -> _GrpcResponses:
        return self

    def __next__(self) -> Delta:
        try:
            while True:
                if (delta := _delta(next(self._call))) is not None:
                    return delta
        except self._rpc_error as error:
            raise self._calls.error(error) from error

    def cancel(self) -> None:
        self._call.cancel()


class AsyncGrpcTransport:
    """gRPC for asyncio. The channel is opened by the first use, inside the running event loop."""

    def __init__(self, address: str, models: Models, tls: bool = False) -> None:
        self._open = lambda: _GrpcCalls(address, models, tls, aio=True)
        self._opened: _GrpcCalls | None = None

    @property
    def _calls(self) -> _GrpcCalls:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def send(self, request: Request, request_id: str, timeout: float | None) -> _AsyncGrpcResponses:
        calls = self._calls
        message = calls.infer_message(calls.models.vlm, request_id, wire.request_tensors(request), timeout)
        return _AsyncGrpcResponses(calls, _checked(calls.infer, message, timeout))

    async def cancel(self, request_id: str) -> None:
        calls = self._calls
        call = _checked(calls.infer, calls.cancel_message(request_id), CONTROL_SECONDS)
        async for _ in _AsyncGrpcResponses(calls, call):
            pass

    async def status(self) -> ServerStatus:
        import grpc

        calls, m = self._calls, self._calls.messages
        try:
            ready = await calls.ready(m.ServerReadyRequest(), timeout=CONTROL_SECONDS)
            metadata = await calls.metadata(m.ServerMetadataRequest(), timeout=CONTROL_SECONDS)
            index = await calls.index(m.RepositoryIndexRequest(), timeout=CONTROL_SECONDS)
        except grpc.RpcError as error:
            raise calls.error(error) from error
        return calls.status(ready, metadata, index)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.channel.close()


class _AsyncGrpcResponses:
    def __init__(self, calls: _GrpcCalls, call: Any) -> None:
        import grpc

        self._calls = calls
        self._call = call
        self._eof = grpc.aio.EOF
        self._rpc_error = grpc.RpcError
        self._cancelled = False

    def __aiter__(self) -> _AsyncGrpcResponses:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (message := await self._call.read()) is not self._eof:
                if (delta := _delta(message)) is not None:
                    return delta
        except self._rpc_error as error:
            raise self._calls.error(error) from error
        except asyncio.CancelledError:
            if self._cancelled:  # by our cancel(); otherwise the task itself is being cancelled
                raise errors.Cancelled("the request was cancelled by this client") from None
            raise
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()
