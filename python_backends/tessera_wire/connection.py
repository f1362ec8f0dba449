"""One gRPC channel to a tritonserver; the only file that imports grpc and the messages of tritonclient."""

from collections.abc import Iterable, Iterator
from typing import Any

from tessera_wire import errors
from tessera_wire.tensors import Tensor

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    # A restarted server is found again at once, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# A server that fell silent is given up after 30 s, in the middle of a call or between two. The pings also keep a
# firewall from forgetting the connection. `tessera serve` lets its server accept them; others may close on them.
KEEP_ALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
BETTER, WORSE = 1, 3  # levels of tritonserver's queues; 2 is the default


class Connection:
    """The channel and the calls on it. Nothing is sent before the first call.

    Args:
        address: ``host:port``.
        tls: whether to speak TLS, trusting this machine's certificates.
        keep_alive: whether to ping a silent server.
    """

    def __init__(self, address: str, tls: bool = False, keep_alive: bool = False) -> None:
        try:
            import grpc
            from tritonclient.grpc import service_pb2, service_pb2_grpc
        except (ImportError, RuntimeError) as error:
            raise errors.TesseraClientError(
                f"gRPC needs tritonclient: {error}", "pip install 'tritonclient[grpc]', or use http://"
            ) from error
        self.address = address
        self._messages: Any = service_pb2
        self._rpc_error = grpc.RpcError
        options = OPTIONS + (KEEP_ALIVE if keep_alive else [])
        if tls:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
        else:
            self._channel = grpc.insecure_channel(address, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def unary(self, name: str) -> Any:
        """A call of one message and one answer, such as ``ServerReady``: grpc's multicallable."""
        return getattr(self._stub, name)

    def ask(self, name: str, timeout: float) -> Any:
        """The answer to a message without contents. Raises errors of :mod:`tessera_wire.errors`."""
        try:
            return self.unary(name)(getattr(self._messages, f"{name}Request")(), timeout=timeout)
        except Exception as error:
            raise self.mapped(error) from error

    def stream(self, requests: Iterator[Any]) -> Any:
        """Starts a ModelStreamInfer call; its responses, to iterate over."""
        return self._stub.ModelStreamInfer(requests)

    def infer(self, message: Any, timeout: float | None = None) -> Any:
        """A model's only response to a request, in a call of its own. Raises errors of :mod:`tessera_wire.errors`."""
        try:
            return self._stub.ModelInfer(message, timeout=timeout)
        except self._rpc_error as error:
            call: Any = error
            code, details = call.code().name, call.details() or ""
            # tritonserver names the request; where it does not, grpc itself found nobody there.
            if code == "UNAVAILABLE" and errors.clean(details) == details:
                raise errors.connection_failed(self.address, details) from error
            raise errors.from_server(details, code) from error
        except ValueError as error:  # grpc's for a channel that is closed
            raise self.mapped(error) from error

    def infer_message(
        self,
        model: str,
        request_id: str,
        tensors: Iterable[Tensor],
        timeout: float | None = None,
        outputs: Iterable[str] = (),
        priority: int = 0,
    ) -> Any:
        """A request to a model; ``timeout`` in seconds. ``outputs``: those that are wanted, where not all are.

        ``priority``: as in sampling_parameters, whose bearer stands in tritonserver's queues as it does in ours.
        """
        message = self._messages.ModelInferRequest(model_name=model, id=request_id)
        for tensor in tensors:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(tensor.data)
        for name in outputs:
            message.outputs.add(name=name)
        if timeout is not None:
            message.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
        if priority:  # the levels of preprocess's config.pbtxt
            message.parameters["priority"].uint64_param = BETTER if priority < 0 else WORSE
        return message

    def mapped(self, error: BaseException) -> errors.TesseraClientError:
        """grpc's error as ours. A call that carries many requests fails only when the connection does."""
        if not isinstance(error, self._rpc_error):
            return errors.Cancelled("the client was closed")
        call: Any = error
        code, details = call.code().name, call.details() or ""
        if code in ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"):
            return errors.connection_failed(self.address, details)
        return errors.from_server(details, code)

    def close(self) -> None:
        """Ends what is under way on it."""
        self._channel.close()
