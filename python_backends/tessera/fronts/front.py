"""What both fronts share: hand a request on to the ensemble, watch for clients that go away.

Cancellation does not reach a step of an ensemble that has begun, so a front, which sees its own client leave, sends the
language model a control request with the request's id.

Where `tessera serve` runs several servers, a front spreads its requests over the ensembles of all of them. A request
whose client gave it an id stays with this server: it is this server's language model that the client may ask to cancel
that id.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tessera.tritonserver import heaps, tensors
from tessera.tritonserver.deadline import KEY as TIMEOUT_KEY
from tessera.tritonserver.failures import error_response, failure, log_exception
from tessera.tritonserver.responder import Responder
from tessera.tritonserver.settings import StageSettings
from tessera_client import errors
from tessera_client.messages import Delta, Models, Request
from tessera_client.pool import NOT_NOW, PooledTransport
from tessera_client.transport import open_transport

WATCH_SECONDS = 0.02
CANCEL_AGAIN_SECONDS = 0.5
THIS_SERVER = 0  # its place among the addresses

# The client's errors -> the status a front answers with; whatever is not here is INTERNAL.
STATUS: dict[type[errors.TesseraClientError], str] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.Unavailable: "UNAVAILABLE",
    errors.DeadlineExceeded: "UNAVAILABLE",
    errors.ConnectionFailed: "UNAVAILABLE",
    errors.Cancelled: "CANCELLED",
}


@dataclass(frozen=True)
class FrontSettings:
    """The model behind a front, and how many requests it hands on at once."""

    ensemble: str = "vlm"
    threads: int = 256


@dataclass
class Watched:
    """A request whose client is watched. One cancel may come too early, while the request is not yet at the language
    model, which knows nothing of it then; so it is sent again until the request ends."""

    request_id: str
    cancel_at: float = 0.0  # not before this, on time.monotonic's clock


class Front(ABC):
    """Base of the two fronts: one thread of the pool hands on one request; one more thread watches the clients."""

    def initialize(self, args: Mapping[str, str]) -> None:
        heaps.one_a_core()
        stage = StageSettings(args)
        settings = stage.read(FrontSettings)
        self._name = stage.stage
        self._transport = self.open_transport(stage.grpc_address, settings.ensemble)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix=self._name)
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
        self._transport.close()

    def open_transport(self, addresses: str, ensemble: str) -> PooledTransport:
        """The way to the ensembles of this machine; the connections themselves are made by the first requests."""
        return open_transport(addresses, Models(vlm=ensemble))

    @abstractmethod
    def wants_stream(self, request: Any) -> bool:
        """Whether the ensemble is to answer in parts."""

    @abstractmethod
    def pong(self, responder: Responder) -> None:
        """Answers a ping."""

    @abstractmethod
    def relay(self, deltas: Iterable[Delta], responder: Responder) -> None:
        """Sends on what the ensemble answers; must end the request."""

    def _take(self, request: Any, responder: Responder) -> None:
        if tensors.text(request, "PING") is not None:
            self.pong(responder)
            return
        forwarded = self._read(request)
        with self._changed:
            # An id of our own where the client gave none, or one that is under way: it is what a control request
            # names, and what tells the answers apart.
            taken = {watched.request_id for watched in self._watched.values()}
            own = responder.request_id and responder.request_id not in taken
            request_id = responder.request_id if own else uuid.uuid4().hex
            self._watched[responder] = Watched(request_id)
            self._changed.notify()
        self._pool.submit(self._serve, responder, forwarded, request_id, THIS_SERVER if own else None)

    def _read(self, request: Any) -> Request:
        """The client's tensors, unchecked: that is for preprocess to do."""
        sampling = tensors.text(request, "sampling_parameters")
        return Request(
            text=tensors.text(request, "text_input"),
            messages=tensors.text(request, "messages"),
            images=tuple(tensors.byte_strings(request, "image")),
            sampling=with_timeout(sampling, request.timeout()) if request.timeout() > 0 else sampling,
            stream=self.wants_stream(request),
            exclude_input=tensors.flag(request, "exclude_input_in_output", False),
        )

    def _serve(self, responder: Responder, request: Request, request_id: str, only: int | None) -> None:
        try:
            self.relay(self._deltas(request, request_id, only), responder)
        except errors.TesseraClientError as error:
            responder.send(failure(STATUS.get(type(error), "INTERNAL"), error.message), final=True)
        except Exception as error:
            responder.send(error_response(self._name, error), final=True)
        finally:
            with self._changed:
                self._watched.pop(responder, None)

    def _deltas(self, request: Request, request_id: str, only: int | None) -> Iterator[Delta]:
        """What the ensemble answers: the server ``only``, else the first that takes the request."""
        untried = 1 if only is not None else len(self._transport.addresses)
        begun = False
        while True:
            responses = self._transport.send(request, request_id, timeout=None, only=only)
            untried -= 1
            try:
                for delta in responses:
                    begun = True
                    yield delta
                return
            except NOT_NOW:
                if begun or not untried:
                    raise
            finally:
                responses.cancel()

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
        try:
            self._transport.cancel(request_id)
        except Exception as error:
            log_exception(self._name, error)


def response(delta: Delta) -> Any:
    """One response of the ensemble as a response of a front."""
    import triton_python_backend_utils as pb_utils

    usage, timings = delta.usage, delta.timings
    spent = (
        (timings.preprocess, timings.vision_queue, timings.vision, timings.queue, timings.first_token, timings.decode)
        if timings
        else (0.0,) * 6
    )
    tokens = (usage.prompt_tokens, usage.completion_tokens, usage.image_tokens) if usage else (0, 0, 0)
    return pb_utils.InferenceResponse(
        output_tensors=[
            tensors.text_output("text_output", delta.text),
            tensors.text_output("finish_reason", delta.finish_reason),
            tensors.output("usage", np.array(tokens, dtype=np.int32)),
            tensors.output("timings", np.array(spent, dtype=np.float32)),
            tensors.text_output("logprobs", json.dumps(delta.logprobs) if delta.logprobs else ""),
            tensors.text_output("choices", json.dumps(list(map(asdict, delta.choices))) if delta.choices else ""),
        ]
    )


def with_timeout(sampling: str | None, microseconds: int) -> str:
    """sampling_parameters with the request's timeout, which ends the request on the server and not here.

    What is no JSON object stays as it is: preprocess says what is wrong with it.
    """
    try:
        parsed = json.loads(sampling or "{}")
    except (ValueError, RecursionError):
        return sampling or ""
    return json.dumps({TIMEOUT_KEY: microseconds, **parsed}) if isinstance(parsed, dict) else sampling or ""
