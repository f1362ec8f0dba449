"""The stage `vision_encoder`: ragged uint8 pixels of many requests in, embedding rows of each out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tessera.tritonserver import tensors
from tessera.tritonserver.deadline import deadline_exceeded, is_over
from tessera.tritonserver.failures import error_response
from tessera.tritonserver.responder import Responder
from tessera.tritonserver.settings import StageSettings
from tessera.vision.encoder import VisionEncoder, VisionItem, VisionSettings


class TritonPythonModel:
    """tritonserver's interface to one VisionEncoder.

    Each request is answered as soon as its own tiles are done, not when the whole batch is.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = StageSettings(args)
        runner = settings.text("runner")
        self._encoder = VisionEncoder.from_checkpoint(
            settings.checkpoint,
            VisionSettings(
                runner=runner,
                device=settings.text("device"),
                dtype=settings.text("dtype"),
                infer_batch_size=settings.integer("visual_infer_batch_size"),
                threads=settings.integer("threads"),
                onnx_path=settings.version_folder / "model.onnx" if runner == "onnx" else None,
                cache_bytes=settings.integer("cache_bytes"),
            ),
        )

    def execute(self, requests: list[Any]) -> None:
        started = time.monotonic_ns()
        requests = [request for request in requests if not self._ended_overdue(request)]
        waiting = {index: Responder(request) for index, request in enumerate(requests)}
        try:
            items = [read_item(request) for request in requests]
            for index, rows in self._encoder.encode_each(items):
                earlier = tensors.array(requests[index], "STAMPS")
                stamps = [] if earlier is None else earlier.reshape(-1).tolist()
                waiting.pop(index).send(_response(rows, [*stamps, started, time.monotonic_ns()]), final=True)
        except Exception as error:
            for responder in waiting.values():
                responder.send(error_response("vision_encoder", error), final=True)

    def _ended_overdue(self, request: Any) -> bool:
        """Answers a request whose time ran out while it waited here, so that no work goes into it."""
        stamps = tensors.array(request, "STAMPS")
        if stamps is None:  # a ping
            return False
        deadline, received = stamps.reshape(-1)[:2].tolist()
        return is_over(deadline) and Responder(request).send(deadline_exceeded(received), final=True)


def read_item(request: Any) -> VisionItem:
    """One request's pixels, plan and digest; views of the server's memory, valid while the request is held.

    A ping is a request without pictures: it goes the way of all others.
    """
    if tensors.text(request, "PING") is not None:
        return VisionItem(np.zeros(0, np.uint8), np.zeros(0, np.int32), np.zeros(0, np.int64))
    pixels = tensors.array(request, "PIXELS")
    plan = tensors.array(request, "PLAN")
    digest = tensors.array(request, "DIGEST")
    if pixels is None or plan is None or digest is None:
        raise ValueError("vision_encoder wants PIXELS, PLAN and DIGEST")
    return VisionItem(pixels=pixels.reshape(-1), plan=plan.reshape(-1), digest=digest.reshape(-1))


def _response(rows: torch.Tensor | None, stamps: list[int]) -> Any:
    import triton_python_backend_utils as pb_utils

    outputs = [tensors.output("STAMPS", np.array([stamps], dtype=np.int64))]
    if rows is not None:
        # The tensor itself, not a capsule: only then are the streams of a GPU synchronised.
        outputs.append(pb_utils.Tensor.from_dlpack("EMBEDDINGS", rows.to(torch.bfloat16).contiguous()))
    return pb_utils.InferenceResponse(output_tensors=outputs)
