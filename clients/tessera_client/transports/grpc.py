"""gRPC: all requests of a client share one call to a server (see :mod:`tessera_wire.line`)."""

import queue
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tessera_client import contract
from tessera_client.messages import Models, ModelStatus, PicturePlan, Request, ServedModel, ServerStatus
from tessera_client.transports import CONTROL_SECONDS, SERVED_SECONDS, Deliver, Sent
from tessera_wire.connection import Connection
from tessera_wire.errors import DeadlineExceeded, TesseraClientError
from tessera_wire.line import Line
from tessera_wire.tensors import Tensor


class GrpcTransport:
    """One server at ``host:port``."""

    def __init__(self, address: str, models: Models, tls: bool) -> None:
        self._model = models.vlm
        self._preprocess = models.preprocess
        self._line = Line(Connection(address, tls), models.language_model, leased=True)

    def send(self, request: Request, request_id: str, timeout: float | None, deliver: Deliver) -> Sent:
        def hand_on(item: Any) -> None:
            if item is not None and not isinstance(item, TesseraClientError):
                names = (output.name for output in item.outputs)
                try:
                    item = contract.delta_from_raw(zip(names, item.raw_output_contents, strict=False))
                except TesseraClientError as error:
                    item = error
            deliver(item)

        tensors, priority = contract.request_tensors(request), request.priority
        stop = self._line.send(self._model, request_id, tensors, hand_on, timeout, priority=priority)
        return Sent(stop, partial(self._cancel, request_id))

    def plan(self, request: Request, timeout: float | None) -> tuple[PicturePlan, ...]:
        return contract.plans_from_raw(self._preprocessed("CUT", contract.question_tensors(request), timeout))

    def served(self) -> ServedModel:
        return contract.served_from_raw(self._preprocessed("SERVED", contract.served_tensors(), SERVED_SECONDS))

    def _preprocessed(
        self, output: str, tensors: Sequence[Tensor], timeout: float | None
    ) -> Iterable[tuple[str, bytes]]:
        """An output that `preprocess` is asked for by its name; not on the line, for tritonserver 2.51 aborts when the
        only response of such a model meets the ensemble's on one stream."""
        connection = self._line.connection
        message = connection.infer_message(self._preprocess, uuid.uuid4().hex, tensors, timeout, (output,))
        answer = connection.infer(message, timeout)
        return zip((output.name for output in answer.outputs), answer.raw_output_contents, strict=False)

    def status(self) -> ServerStatus:
        ask = self._line.connection.ask
        ready, metadata, index = (
            ask(name, CONTROL_SECONDS) for name in ("ServerReady", "ServerMetadata", "RepositoryIndex")
        )
        models = tuple(ModelStatus(m.name, m.version, m.state, m.reason) for m in index.models)
        return ServerStatus(bool(ready.ready), metadata.version, models)

    def close(self) -> None:
        """Cancels what is under way on the server, then lets the line end in order."""
        self._line.close(CONTROL_SECONDS)

    def _cancel(self, request_id: str) -> None:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        forget = self._line.cancel(request_id, told.put)
        try:
            answer = told.get(timeout=CONTROL_SECONDS)
        except queue.Empty:
            forget()
            raise DeadlineExceeded("the server did not answer the control request") from None
        if isinstance(answer, TesseraClientError):
            raise answer
