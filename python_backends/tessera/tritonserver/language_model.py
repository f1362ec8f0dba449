"""The stage `language_model`: token ids, spans and embedding rows in; text, reason, usage and timings out."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from tessera.cascade import Watch
from tessera.engine.process.client import EngineProcess
from tessera.engine.sequence import Request, SamplingParameters, TokenEvent
from tessera.errors import ConfigError, InvalidRequest, end_process_if_lost
from tessera.models.registry import read_config
from tessera.settings.gpu import GpuMeter
from tessera.settings.stages import EngineConfig
from tessera.tritonserver import backend, ensemble, leases, tensors
from tessera.tritonserver.cascade import FullCut, FullCuts, Watching
from tessera.tritonserver.engine_metrics import MetricsPage
from tessera.tritonserver.failures import deadline_exceeded, error_response, failure
from tessera.tritonserver.fingerprint import fingerprint
from tessera.tritonserver.gpu_pool import answer_warm_up
from tessera.tritonserver.leases import Leases
from tessera.tritonserver.metrics import show_weights, write_to_server_log
from tessera.tritonserver.responder import Channel, Outbox, Responder
from tessera.tritonserver.settings import StageSettings
from tessera.tritonserver.tensors import unpacked
from tessera_wire.connection import Connection
from tessera_wire.errors import TesseraClientError
from tessera_wire.line import Line

_LOG = logging.getLogger(__name__)

SENDER_THREADS = 2
SWITCH_S = 0.0001  # for threads that wait for the interpreter while text is made


def meter_of(device: str) -> GpuMeter | None:
    """Of the GPU that this process computes on, if there is one and it tells."""
    if device == "cpu":
        return None
    try:
        return GpuMeter.of_process(os.environ)
    except OSError as error:
        _LOG.warning("no joules among the metrics: %s", error)
        return None


class TritonPythonModel:
    """tritonserver's interface to the engine: execute() only submits, sender threads answer."""

    def initialize(self, args: Mapping[str, str]) -> None:
        write_to_server_log("language_model")
        settings = StageSettings(args)
        sys.setswitchinterval(SWITCH_S)
        self._outbox = Outbox("language_model", SENDER_THREADS)
        self._hidden = read_config(settings.checkpoint).text.row_size
        # Without its engine the stage is as good as dead; as a dead process it is noticed and restarted.
        config = settings.read(EngineConfig)
        self._device = config.device
        watching = watching_of(settings, config, lambda: not self._engine.counts()["requests_waiting"])
        with ThreadPoolExecutor(1) as beside:
            told = beside.submit(fingerprint, settings, config)
            self._engine = EngineProcess(settings.checkpoint, config, partial(os._exit, 1))
        self._unsaid = Unsaid(told.result())
        show_weights("language_model", self._engine.weights, self._engine.weight_bytes)
        self._full_cuts = FullCuts(Line(Connection(settings.grpc_address)), self._outbox, watching)
        self._page = MetricsPage(lambda: self._engine.counts() | self._full_cuts.counts(), meter_of(config.device))
        self._leases = Leases(self._cancel)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = Responder(request)
            try:
                self._take(request, responder)
            except Exception as error:
                responder.send(error_response("language_model", error), final=True)

    def finalize(self) -> None:
        self._leases.stop()
        self._engine.stop()
        self._full_cuts.close()
        self._outbox.close()
        self._page.close()

    def _take(self, request: Any, responder: Responder) -> None:
        ping = tensors.text(request, "PING")
        if ping == "":
            answer_warm_up(responder, "timings", torch.zeros(6, device=self._device))
            return
        if ping is not None:
            end_process_if_lost()
            responder.send(tensors.response([tensors.text_output("cascade", self._full_cuts.watched())]), final=True)
            return
        cancel = tensors.text(request, "CANCEL")
        if cancel is not None:
            if not cancel:
                raise InvalidRequest("CANCEL is empty; it names the request id, or the lease, to cancel")
            self._leases.end(cancel)
            responder.finish()
            return
        lease = tensors.text(request, "LEASE")
        if lease is not None:
            self._leases.open(lease, responder)
            return
        reply = Reply(request, responder, self._page, self._full_cuts, self._unsaid)
        stream, margin = reply.stream and not reply.full_cut, reply.full_cut is not None
        whole, rows = read_request(request, stream, reply.deadline_ns, margin)
        rows = None if rows is None else unpacked(rows, self._hidden)
        self._engine.submit(whole, partial(self._outbox.post, reply.channel), rows)
        if leases.is_over(whole.lease):  # asked after it can be cancelled: none falls between
            self._engine.cancel(whole.number)
        # On a sender's thread: what asks the server waits for it.
        cancel_if_left = partial(self._cancel_if_left, responder, whole.number)
        self._outbox.post(Channel(lambda calls: calls[0]()), cancel_if_left)

    def _cancel(self, name: str) -> None:
        self._engine.cancel_all(name)
        for lease in self._full_cuts.leases_of(name):
            self._leases.end(lease)

    def _cancel_if_left(self, responder: Responder, number: int) -> None:
        """For a client that left while an earlier stage ran, which nothing else reports."""
        if responder.is_cancelled():
            self._engine.cancel(number)


def watching_of(settings: StageSettings, config: EngineConfig, idle: Callable[[], bool]) -> Watching | None:
    """What the server watches, if it follows a policy file. Raises ConfigError."""
    policy = settings.policy
    if policy.plan is None:
        return None
    if config.deterministic and policy.on_alarm == "escalate":
        raise ConfigError("deterministic is on, and others' answers change one by on_alarm escalate: turn one off")
    return Watching(Watch(policy.plan), policy.audit, policy.on_alarm == "escalate", idle)


def read_request(
    request: Any, stream: bool, deadline_ns: int | None, margin: bool = False
) -> tuple[Request, torch.Tensor | None]:
    """The stage's tensors as the engine's Request, and its rows, the server's own: valid during execute()."""
    input_ids, spans = tensors.array(request, "INPUT_IDS"), tensors.array(request, "SPANS")
    if input_ids is None or spans is None:
        raise InvalidRequest("language_model wants INPUT_IDS and SPANS; clients talk to the ensemble 'vlm'")
    digest, positions = tensors.array(request, "DIGEST"), tensors.array(request, "POSITIONS")
    sampling = SamplingParameters.parse(tensors.sampling(request, "sampling_parameters"))
    rows = backend().get_input_tensor_by_name(request, "EMBEDDINGS")
    whole = Request(
        request_id=request.request_id(),
        lease=tensors.lease(request),
        input_ids=input_ids.copy(),
        spans=spans.copy(),
        embeddings=None,
        digest=np.zeros(0, np.int64) if digest is None else digest.reshape(-1).copy(),
        sampling=sampling,
        stream=stream,
        deadline_ns=deadline_ns,
        positions=None if positions is None else positions.copy(),
        margin=margin and sampling.choices is None,  # labels have one by themselves
        since_ns=tensors.since(request),
    )
    # A text-only request past a plan brings the rows of a blank tile, which nothing points at.
    has_rows = rows is not None and spans.size > 0
    return whole, torch.from_dlpack(rows).flatten(0, -2) if has_rows else None


class Unsaid(threading.local):
    """What a response says by none of its outputs, made once for each thread that sends: most are a bit of text, and
    ten new tensors cost a streamed part more than all else. Two threads cannot share one: the first time that a tensor
    is sent it is copied to where the server reads it, and no lock is held meanwhile."""

    def __init__(self, fingerprint: str) -> None:
        self._outputs = [
            tensors.text_output("finish_reason", ""),
            tensors.output("usage", np.zeros(3, np.int32)),
            tensors.output("cached_tokens", np.zeros(1, np.int32)),
            tensors.output("drafted_tokens", np.zeros(2, np.int32)),
            tensors.output("timings", np.zeros(6, np.float32)),
            tensors.text_output("logprobs", ""),
            tensors.text_output("choices", ""),
            tensors.text_output("cascade", ""),
            tensors.text_output("fingerprint", fingerprint),
        ]

    def response(self, said: Iterable[Any]) -> Any:
        """With these outputs in the place of those of their names."""
        return tensors.response({tensor.name(): tensor for tensor in (*self._outputs, *said)}.values())


class Reply:
    """Turns one request's token events into responses. With a ``full_cut``, into one, if it is not asked for that."""

    def __init__(
        self, request: Any, responder: Responder, page: MetricsPage, full_cuts: FullCuts, unsaid: Unsaid
    ) -> None:
        self.responder = responder
        self._page, self._full_cuts, self._unsaid = page, full_cuts, unsaid
        self.stream = tensors.flag(request, "stream", True)
        echo = not tensors.flag(request, "exclude_input_in_output", False)
        self._prefix = (tensors.text(request, "text_input") or "") if echo else ""
        self._stamps = tensors.timestamps(request, "STAMPS", "language_model", tensors.OF_BOTH, tensors.OF_PREPROCESS)
        self.deadline_ns = self._stamps.deadline or None
        self.channel: Channel[TokenEvent] = Channel(self._deliver)
        parts = tensors.byte_strings(request, "CASCADE")
        self.full_cut = FullCut(request, parts, self._stamps, self.stream) if parts else None

    def _deliver(self, events: list[TokenEvent]) -> None:
        last = events[-1]
        if last.refusal is not None:
            self._fail(last.refusal)
            return
        if last.finish_reason is not None:
            self._page.observe(last)
        if last.finish_reason == "error":
            self.responder.send(failure("INTERNAL", f"language_model failed: {last.error}"), final=True)
            return
        if last.finish_reason == "deadline" and not last.usage.completion_tokens:
            self.responder.send(deadline_exceeded(self._stamps.received), final=True)
            return
        cascade = ""
        if self.full_cut and last.finish_reason in ("stop", "length"):
            assert last.margin is not None, "nothing tells the answer's margin"
            escalated = self._full_cuts.decide(self.full_cut, last.margin, last.text)
            told = {"margin": last.margin, "escalated": escalated}
            cascade = json.dumps(told)
            if escalated:
                self._full_cuts.ask(self.full_cut, partial(self._hand_on, cascade, self._timings(last)), self._fail)
                return
        text, self._prefix = self._prefix + "".join(event.text for event in events), ""
        entries = [entry for event in events for entry in event.logprobs or []]
        said = [tensors.text_output("text_output", text)]
        if entries:
            said.append(tensors.text_output("logprobs", json.dumps(entries)))
        if last.finish_reason is not None:
            said += [
                tensors.text_output("finish_reason", last.finish_reason),
                tensors.output("usage", np.array(last.usage, dtype=np.int32)),
                # Not more numbers of usage: clients of before unpack that as three.
                tensors.output("cached_tokens", np.array([last.cached_tokens], dtype=np.int32)),
                tensors.output("drafted_tokens", np.array(last.drafted_tokens, dtype=np.int32)),
                tensors.output("timings", self._timings(last)),
                tensors.text_output("choices", json.dumps(last.choices) if last.choices else ""),
                tensors.text_output("cascade", cascade),
            ]
        self.responder.send(self._unsaid.response(said), last.finish_reason is not None)

    def _fail(self, error: Exception) -> None:
        self.responder.send(error_response("language_model", error), final=True)

    def _hand_on(self, cascade: str, first_ms: np.ndarray, item: Any) -> None:
        """What the ensemble answers to the full cut, in place of the first one's answer."""
        if item is None or isinstance(item, TesseraClientError):
            self.responder.send(ensemble.failed(item), final=True)  # not sent where the answer was
            return
        outputs = ensemble.outputs(item)
        final = outputs["finish_reason"][0] != b""
        if final:
            outputs["cascade"] = np.array([cascade.encode()], dtype=np.object_)
            # It counts from the first cut's arrival.
            outputs["timings"][0] = max(0.0, outputs["timings"][0] - first_ms.sum())
            outputs["timings"] += first_ms
        self.responder.send(ensemble.response(outputs), final)

    def _timings(self, event: TokenEvent) -> np.ndarray:
        """Milliseconds from one station to the next: see `timings` in the stage's config.pbtxt."""
        passed = [*self._stamps[2:], event.scheduled_ns, event.first_token_ns, event.emitted_ns]
        stations = np.maximum.accumulate(np.array(passed, dtype=np.int64))
        return (np.diff(stations) / 1e6).astype(np.float32)
