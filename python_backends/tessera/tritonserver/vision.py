"""The stage `vision_encoder`: ragged uint8 pixels of many requests in, embedding rows of each out."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera import heaps
from tessera.errors import InvalidRequest, end_process_if_lost
from tessera.models.registry import read_config, spec_of
from tessera.settings.stages import VisionSettings
from tessera.tritonserver import backend, engine_busy, leases, tensors
from tessera.tritonserver.failures import deadline_exceeded, error_response, is_over, log_exception
from tessera.tritonserver.gpu_pool import answer_warm_up
from tessera.tritonserver.metrics import Counter, Gauge, Renewed, show_weights, write_to_server_log
from tessera.tritonserver.responder import Responder
from tessera.tritonserver.settings import StageSettings
from tessera.tritonserver.tensors import packed
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera.vision.remote import RemoteDispatcher
from tessera.vision.scheduler import VisionScheduler


class TritonPythonModel:
    """tritonserver's interface to one dispatcher: execute() hands over, the answers come from other threads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        heaps.keep_freed()
        write_to_server_log("vision_encoder")
        stage = StageSettings(args)
        settings = replace(stage.read(VisionSettings), tile_policy=stage.policy.full)
        url = settings.vision_url
        self._device = "cpu" if url else settings.device  # where rows are sent from
        self._dispatcher = RemoteDispatcher(url) if url else local_scheduler(stage.checkpoint, settings)
        self._page = page_of(self._dispatcher) if isinstance(self._dispatcher, VisionScheduler) else None

    def execute(self, requests: list[Any]) -> None:
        jobs = []
        for request in requests:
            job = StageJob(request)
            try:
                word = tensors.text(request, "PING")
                if word == "":
                    job.warm_up(self._device)
                elif word is not None:
                    end_process_if_lost()
                    self._dispatcher.ping(job)
                elif job.read(request):
                    self._dispatcher.check(job.item)
                    jobs.append(job)
            except Exception as error:
                job.fail(error)
        self._dispatcher.encode(jobs)

    def finalize(self) -> None:
        self._dispatcher.close()
        if self._page:
            self._page.close()


def local_scheduler(checkpoint: Path, settings: VisionSettings) -> VisionScheduler:
    """The tower in this process."""
    config = read_config(checkpoint)
    if (priority := spec_of(config.raw, config.folder).mps_priority) is not None:
        os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", str(priority))
    encoder = VisionEncoder.from_checkpoint(config, settings)
    encoder.engine_busy = engine_busy.told
    show_weights("vision_encoder", *encoder.weights)
    return VisionScheduler(encoder)


def page_of(dispatcher: VisionScheduler) -> Renewed:
    """The dispatcher's numbers on the server's metrics page."""
    rows = Gauge("tessera_vision_row_bytes", "Rows of pictures reserved or held for requests that are not answered")
    waiting = Gauge("tessera_vision_requests_waiting", "Requests that wait for the vision stage's encoder")
    computed = Counter(
        "tessera_vision_pictures_total", "Pictures that the vision tower computed, repeated ones left out"
    )

    launching = Counter(
        "tessera_vision_launching_seconds_total", "Time that the host took to launch the tower's forwards"
    )

    def renew() -> None:
        computed.raise_to(dispatcher.encoder.computed)
        launching.raise_to(dispatcher.encoder.launching_s)
        rows.set(dispatcher.encoder.budget.used_bytes)
        waiting.set(len(dispatcher.queue))

    return Renewed(renew)


class StageJob:
    """One request and the way back to it; see :class:`tessera.vision.scheduler.Job`."""

    item = VisionItem(np.empty(0, np.uint8), np.empty(0, np.int32), np.empty(0, np.int64))

    def __init__(self, request: Any) -> None:
        self._responder = Responder(request)
        self._started = time.monotonic_ns()
        self._stamps = tensors.RequestTimestamps()
        self._lease = ""
        self.since_ns = 0

    @property
    def deadline_ns(self) -> int:
        """On time.monotonic_ns's clock; 0 is none. Long past where the client has gone."""
        if leases.is_over(self._lease):
            return 1
        return self._stamps.deadline

    @property
    def priority(self) -> int:
        """Lower goes first; 0 where preprocess said nothing."""
        return self._stamps.priority

    def begin(self) -> None:
        """It waits no longer."""
        self._started = time.monotonic_ns()

    def read(self, request: Any) -> bool:
        """Reads the request's tensors; False if it needed no work and is answered."""
        self._stamps = tensors.timestamps(request, "STAMPS", "vision_encoder", tensors.OF_PREPROCESS)
        self._lease, self.since_ns = tensors.lease(request), tensors.since(request)
        if is_over(self.deadline_ns):  # its time ran out while it waited here: no work goes into it
            self._responder.send(deadline_exceeded(self._stamps.received), final=True)
            return False
        self.item = read_item(request)
        if not (self.item.plan.size or self.item.pixels.size or self.item.digest.size):  # a prompt alone
            self.answer(None)
            return False
        return True

    def warm_up(self, device: str) -> None:
        answer_warm_up(self._responder, "EMBEDDINGS", torch.zeros(1, 1, dtype=torch.bfloat16, device=device))

    def answer(self, rows: torch.Tensor | None) -> None:
        stamps = self._stamps._replace(encoding=self._started, encoded=time.monotonic_ns())
        outputs = [tensors.output("STAMPS", np.array([stamps], dtype=np.int64))]
        if rows is not None:
            # The tensor itself, not a capsule: only then are the streams of a GPU synchronised.
            outputs.append(backend().Tensor.from_dlpack("EMBEDDINGS", packed(rows)))
        self._responder.send(tensors.response(outputs), final=True)

    def fail(self, error: BaseException) -> None:
        late = isinstance(error, TimeoutError)
        try:
            response = deadline_exceeded(self._stamps.received) if late else error_response("vision_encoder", error)
            self._responder.send(response, final=True)
        except Exception as unsent:
            log_exception("vision_encoder", unsent)


def read_item(request: Any) -> VisionItem:
    """One request's pixels, plan and digest; views of the server's memory, valid while the request is held."""
    pixels = tensors.array(request, "PIXELS")
    plan = tensors.array(request, "PLAN")
    digest = tensors.array(request, "DIGEST")
    if pixels is None or plan is None or digest is None:
        raise InvalidRequest("vision_encoder wants PIXELS, PLAN and DIGEST; clients talk to the ensemble 'vlm'")
    return VisionItem(pixels=pixels.reshape(-1), plan=plan.reshape(-1), digest=digest.reshape(-1))
