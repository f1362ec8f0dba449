"""What both fronts share: forward a request to the ensemble, watch for clients that go away.

Cancellation does not reach a step of an ensemble that has begun, so a front, which sees its own client leave, sends
the language model a control request with the request's id.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.tritonserver import tensors
from tessera.tritonserver.deadline import KEY as TIMEOUT_KEY
from tessera.tritonserver.failures import error_response, log_exception
from tessera.tritonserver.responder import Responder
from tessera.tritonserver.settings import StageSettings

INPUTS = ("text_input", "messages", "image", "sampling_parameters", "exclude_input_in_output", "stream")
OUTPUTS = ("text_output", "finish_reason", "usage", "timings", "logprobs")
WATCH_SECONDS = 0.02
CANCEL_AGAIN_SECONDS = 0.5


@dataclass
class Watched:
    """A request whose client is watched. One cancel may come too early, while the request is not yet at the language
    model, which knows nothing of it then; so it is sent again until the request ends."""

    request_id: str
    cancel_at: float = 0.0  # not before this, on time.monotonic's clock


class Front:
    """Base of the two fronts: one thread of the pool relays one request; one more thread watches the clients."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = StageSettings(args)
        self._name = settings.stage
        self._ensemble = settings.text("ensemble")
        self._pool = ThreadPoolExecutor(settings.integer("threads"), thread_name_prefix=self._name)
        # Cancels have a thread of their own: the pool may be full of the very requests to cancel.
        self._cancels = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-cancel")
        self._watched: dict[Responder, Watched] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = Responder(request)
            try:
                self._take(request, responder)
            except Exception as error:
                responder.send(error_response(self._name, error), final=True)

    def finalize(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._watcher.join()
        self._pool.shutdown(wait=True)
        self._cancels.shutdown(wait=True)

    def _take(self, request: Any, responder: Responder) -> None:
        if tensors.text(request, "PING") is not None:
            self.pong(responder)
            return
        inputs = self.inputs(request)
        # An id of our own where the client gave none: it is what a control request names.
        request_id = responder.request_id or uuid.uuid4().hex
        self._pool.submit(self._serve, responder, inputs, request_id)

    def inputs(self, request: Any) -> list[Any]:
        """The tensors to forward; a front may replace some."""
        forwarded = {tensor.name(): tensor for tensor in request.inputs() if tensor.name() in INPUTS}
        if request.timeout() > 0:
            sampling = with_timeout(tensors.text(request, "sampling_parameters"), request.timeout())
            forwarded["sampling_parameters"] = tensors.text_output("sampling_parameters", sampling)
        return list(forwarded.values())

    def pong(self, responder: Responder) -> None:
        """Answers a ping."""
        raise NotImplementedError

    def relay(self, responses: Iterator[Any], responder: Responder) -> None:
        """Sends on what the ensemble answers; must end the request."""
        raise NotImplementedError

    def _serve(self, responder: Responder, inputs: list[Any], request_id: str) -> None:
        import triton_python_backend_utils as pb_utils

        with self._changed:
            self._watched[responder] = Watched(request_id)
            self._changed.notify()
        try:
            call = pb_utils.InferenceRequest(
                model_name=self._ensemble,
                requested_output_names=list(OUTPUTS),
                inputs=inputs,
                request_id=request_id,
            )
            self.relay(call.exec(decoupled=True), responder)
        except Exception as error:
            responder.send(error_response(self._name, error), final=True)
        finally:
            with self._changed:
                self._watched.pop(responder, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopping)
                if self._stopping:
                    return
                watched = list(self._watched.items())
            for responder, request in watched:
                now = time.monotonic()
                if now >= request.cancel_at and responder.is_cancelled():
                    request.cancel_at = now + CANCEL_AGAIN_SECONDS
                    self._cancels.submit(self._cancel, request.request_id)
            time.sleep(WATCH_SECONDS)

    def _cancel(self, request_id: str) -> None:
        import triton_python_backend_utils as pb_utils

        try:
            control = pb_utils.InferenceRequest(
                model_name="language_model",
                requested_output_names=[],
                inputs=[pb_utils.Tensor("CANCEL", np.array([request_id.encode()], dtype=np.object_))],
            )
            for _ in control.exec(decoupled=True):
                pass
        except Exception as error:
            log_exception(self._name, error)


def with_timeout(sampling: str | None, microseconds: int) -> str:
    """sampling_parameters with the request's timeout, which a call between models would lose.

    What is no JSON object stays as it is: preprocess says what is wrong with it.
    """
    try:
        parsed = json.loads(sampling or "{}")
    except (ValueError, RecursionError):
        return sampling or ""
    return json.dumps({TIMEOUT_KEY: microseconds, **parsed}) if isinstance(parsed, dict) else sampling or ""
