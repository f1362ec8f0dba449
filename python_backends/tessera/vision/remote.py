"""The vision stage of another tritonserver, asked over gRPC (docs/remote_vision.md).

Every job is one ModelInfer call to the model `vision_encoder` there; all calls share one connection, none waits for
another. Rows come back over the CPU. gRPC sets TCP_NODELAY on every TCP socket, on both sides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import tessera.tritonserver.client_path  # noqa: F401
from tessera.errors import ConfigError, InvalidRequest, Unavailable
from tessera.tritonserver.outbox import Channel, Outbox
from tessera.vision.dispatch import Job
from tessera.vision.encoding.pictures import VisionItem
from tessera_client import errors
from tessera_client.transport import parse_url

MODEL = "vision_encoder"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
SENDER_THREADS = 2
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    # A restarted server is found again at once, not after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A server that fell silent is given up after 30 s, in the middle of a call or between two. The pings also keep a
    # firewall from forgetting the connection. `tessera serve` lets its server accept them.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class RemoteDispatcher:
    """Jobs to the server at ``url``: ``host:port``, ``grpc://host:port`` or ``grpcs://host:port`` (TLS).

    Nothing is sent before the first job, and a server that cannot be reached only fails the jobs: so either server may
    be started, or restarted, first. What the other server has computed before, it keeps; nothing is cached here.
    """

    def __init__(self, url: str) -> None:
        import grpc
        from tritonclient.grpc import service_pb2

        try:
            scheme, self.address = parse_url(url)
        except errors.InvalidRequest as error:
            raise ConfigError(f"vision_encoder: vision_url: {error}") from None
        if scheme not in ("grpc", "grpcs"):
            raise ConfigError(f"vision_encoder: vision_url {url!r} must be a gRPC address, host:port")
        self._channel = (
            grpc.secure_channel(self.address, grpc.ssl_channel_credentials(), options=OPTIONS)
            if scheme == "grpcs"
            else grpc.insecure_channel(self.address, options=OPTIONS)
        )
        self._messages: Any = service_pb2
        self._infer = self._channel.unary_unary(
            METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        self._outbox = Outbox("vision_encoder", SENDER_THREADS)
        self._changed = threading.Condition()
        self._under_way = 0

    def check(self, item: VisionItem) -> None:
        """The other server checks."""

    def encode(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._ask(job)
            except Exception as error:
                job.fail(error)

    def close(self) -> None:
        self._channel.close()  # which ends the calls under way
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
        self._outbox.close()

    def _ask(self, job: Job) -> None:
        # The clocks of two machines agree on nothing but how long something takes.
        remaining = (job.deadline_ns - time.monotonic_ns()) / 1e9 if job.deadline_ns else None
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        call = self._infer.future(request_message(self._messages, job.item), timeout=remaining)
        with self._changed:
            self._under_way += 1
        answered: Channel[Any] = Channel(partial(self._finish, job))
        call.add_done_callback(lambda done: self._outbox.post(answered, done))

    def _finish(self, job: Job, calls: list[Any]) -> None:
        (call,) = calls
        try:
            code = call.code().name
            if code != "OK":
                raise self._mapped(code, call.details() or "")
            job.answer(rows_of(call.result()))
        except Exception as error:
            job.fail(error)
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _mapped(self, code: str, details: str) -> Exception:
        """gRPC's status as this server's error. What is the other server's fault is not the client's."""
        found = errors.from_server(details, code)
        if isinstance(found, errors.DeadlineExceeded):
            return TimeoutError(details)
        if code == "INVALID_ARGUMENT":
            return InvalidRequest(found.message)
        if isinstance(found, (errors.Unavailable, errors.Cancelled)):
            return Unavailable(f"the vision stage at {self.address} does not answer: {found.message}")
        return RuntimeError(f"the vision stage at {self.address}: {code}: {details}")


def request_message(messages: Any, item: VisionItem) -> Any:
    """A ModelInferRequest (of tritonclient's module ``messages``) with copies of the item's tensors."""
    message = messages.ModelInferRequest(model_name=MODEL)
    for name, datatype, values in (
        ("PIXELS", "UINT8", item.pixels),
        ("PLAN", "INT32", item.plan),
        ("DIGEST", "INT64", item.digest),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=(1, values.size))
        message.raw_input_contents.append(values.tobytes())
    message.outputs.add(name="EMBEDDINGS")
    return message


def rows_of(response: Any) -> torch.Tensor:
    """bf16 rows [tokens, hidden] of a ModelInferResponse, on the CPU."""
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "EMBEDDINGS":
            return torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(*output.shape)
    raise RuntimeError("the other server's vision_encoder sent no EMBEDDINGS")
