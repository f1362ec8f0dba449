"""The vision stage of another tritonserver, asked over gRPC (docs/remote_vision.md).

Every job is one ModelInfer call to the model `vision_encoder` there; all calls share one connection, none waits for
another. Rows come back over the CPU. gRPC sets TCP_NODELAY on every TCP socket, on both sides.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tessera.errors import ConfigError, InvalidRequest, Unavailable
from tessera.vision.pictures import VisionItem
from tessera.vision.scheduler import Job
from tessera_wire import errors
from tessera_wire.connection import Connection
from tessera_wire.tensors import Tensor, parse_url

MODEL = "vision_encoder"
SENDER_THREADS = 2


class RemoteDispatcher:
    """Jobs to the server at ``url``: ``host:port``, ``grpc://host:port`` or ``grpcs://host:port`` (TLS).

    Nothing is sent before the first job, and a server that cannot be reached only fails the jobs: so either server may
    be started, or restarted, first. What the other server has computed before, it keeps; nothing is cached here.
    """

    def __init__(self, url: str) -> None:
        try:
            scheme, self.address = parse_url(url)
        except errors.InvalidRequest as error:
            raise ConfigError(f"vision_encoder: vision_url: {error}") from None
        if scheme not in ("grpc", "grpcs"):
            raise ConfigError(f"vision_encoder: vision_url {url!r} must be a gRPC address, host:port")
        self._connection = Connection(self.address, tls=scheme == "grpcs", keep_alive=True)
        self._infer = self._connection.unary("ModelInfer")
        self._senders = ThreadPoolExecutor(SENDER_THREADS, "vision_encoder-send")
        self._changed = threading.Condition()
        self._under_way = 0

    def check(self, item: VisionItem) -> None:
        """The other server checks."""

    def ping(self, job: Job) -> None:
        job.answer(None)

    def encode(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._ask(job)
            except Exception as error:
                job.fail(error)

    def close(self) -> None:
        self._connection.close()  # which ends the calls under way
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
        self._senders.shutdown()

    def _ask(self, job: Job) -> None:
        # The clocks of two machines agree on nothing but how long something takes.
        remaining = (job.deadline_ns - time.monotonic_ns()) / 1e9 if job.deadline_ns else None
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        call = self._infer.future(self._message(job.item, job.priority), timeout=remaining)
        with self._changed:
            self._under_way += 1
        call.add_done_callback(lambda done: self._senders.submit(self._finish, job, done))

    def _message(self, item: VisionItem, priority: int) -> Any:
        """A ModelInferRequest with copies of the item's tensors. The times of this machine mean nothing there."""
        inputs = (
            *(("PIXELS", "UINT8", item.pixels), ("PLAN", "INT32", item.plan), ("DIGEST", "INT64", item.digest)),
            ("STAMPS", "INT64", np.array([0, priority, 0, 0])),
        )
        message = self._connection.infer_message(
            MODEL, "", [Tensor(name, kind, (1, values.size), values.tobytes()) for name, kind, values in inputs]
        )
        message.outputs.add(name="EMBEDDINGS")
        return message

    def _finish(self, job: Job, call: Any) -> None:
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


def rows_of(response: Any) -> torch.Tensor:
    """Rows of a ModelInferResponse as they travel (tritonserver/tensors.py), on the CPU."""
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "EMBEDDINGS":
            return torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(*output.shape)
    raise RuntimeError("the other server's vision_encoder sent no EMBEDDINGS")
