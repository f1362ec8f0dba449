"""The fronts `vlm_unary` and `vlm_stream`: hand a request on to this server's ensemble, watch for clients that leave.

Cancellation does not reach a step of an ensemble that has begun, so a front, which sees its own client leave, ends the
lease that the request names at the language model (tritonserver/leases.py).
"""

import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from tessera.tritonserver import ensemble, tensors
from tessera.tritonserver.failures import KEY as TIMEOUT_KEY
from tessera.tritonserver.failures import error_response
from tessera.tritonserver.responder import Channel, Outbox, Responder, Watcher
from tessera.tritonserver.settings import StageSettings
from tessera_wire import errors
from tessera_wire.connection import Connection
from tessera_wire.line import Line
from tessera_wire.tensors import Tensor

WATCH_SECONDS = 0.02
SENDER_THREADS = 4


class TritonPythonModel:
    """Either front: `vlm_stream`, which is decoupled, relays each response as it comes, `vlm_unary` asks the ensemble
    not to stream and hands its one response on.

    A few threads send what the ensemble answers; one more watches the clients.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        stage = StageSettings(args)
        self._name, self._streams = stage.stage, stage.decoupled
        self._line = self.open_line(stage.grpc_address)
        self._outbox = Outbox(self._name, SENDER_THREADS)
        self._request_ids: dict[Responder, str] = {}
        self._lock = threading.Lock()
        self._clients = Watcher(f"{self._name}-watch", WATCH_SECONDS, self._line.cancel)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = Responder(request)
            try:
                self._take(request, responder)
            except Exception as error:
                self._forget(responder)
                responder.send(error_response(self._name, error), final=True)

    def finalize(self) -> None:
        self._clients.close()
        self._line.close(ensemble.CLOSE_SECONDS)
        self._outbox.close()

    def open_line(self, address: str) -> Line:
        """The way to this server's ensemble; the connection itself is made by the first request."""
        return Line(Connection(address))

    def _take(self, request: Any, responder: Responder) -> None:
        if tensors.text(request, "PING") is not None:
            if not self._streams:
                responder.send(tensors.response([tensors.text_output("finish_reason", "")]), final=True)
            responder.finish()
            return
        sampling = tensors.sampling(request, "sampling_parameters")
        inputs, priority = self._inputs(request, sampling), sampling.get("priority")
        lease = uuid.uuid4().hex  # what it is cancelled by: ids may come again, leases do not
        with self._lock:
            # An id of our own where the client gave none, or one that is under way: it tells the answers apart.
            own = responder.request_id and responder.request_id not in self._request_ids.values()
            request_id = self._request_ids[responder] = responder.request_id if own else uuid.uuid4().hex
        self._clients.watch(responder, lease)
        channel: Channel[Any] = Channel(partial(self._answer, responder))
        self._line.send(
            *(ensemble.ENSEMBLE, request_id, inputs, partial(self._outbox.post, channel)),
            priority=priority if isinstance(priority, int) else 0,
            lease=lease,
        )

    def _inputs(self, request: Any, sampling: dict[str, Any]) -> list[Tensor]:
        """The client's tensors, unchecked, but for those that a front decides or that request parameters add to."""
        if request.timeout() > 0:  # ends the request on the server, not here
            sampling.setdefault(TIMEOUT_KEY, request.timeout())
        flags = {
            "stream": self._streams and tensors.flag(request, "stream", True),
            "exclude_input_in_output": tensors.flag(request, "exclude_input_in_output", False),
        }
        texts = (
            (tensor.name(), [*map(bytes, tensor.as_numpy().reshape(-1))])
            for tensor in request.inputs()
            if tensor.name() not in (*flags, "sampling_parameters")
        )
        return ensemble.inputs(texts, sampling, flags)

    def _answer(self, responder: Responder, items: list[Any]) -> None:
        for item in items:
            ended = item is None or isinstance(item, errors.TesseraClientError)
            try:
                if not ended:
                    responder.send(ensemble.response(ensemble.outputs(item)), final=not self._streams)
                elif item is None and self._streams:
                    responder.finish()
                else:  # not sent where the answer was
                    responder.send(ensemble.failed(item), final=True)
            except Exception as error:
                responder.send(error_response(self._name, error), final=True)
            if ended:
                self._forget(responder)

    def _forget(self, responder: Responder) -> None:
        self._clients.forget(responder)
        with self._lock:
            self._request_ids.pop(responder, None)
