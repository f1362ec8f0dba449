"""The stage `vision_encoder`: ragged uint8 pixels of many requests in, embedding rows of each out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tessera.errors import InvalidRequest
from tessera.tritonserver import tensors
from tessera.tritonserver.deadline import deadline_exceeded, is_over
from tessera.tritonserver.failures import error_response
from tessera.tritonserver.responder import Responder
from tessera.tritonserver.server_log import write_to_server_log
from tessera.tritonserver.settings import StageSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem
from tessera.vision.settings import VisionSettings

STAMPS = 3  # deadline, and when preprocess received and ended


class TritonPythonModel:
    """tritonserver's interface to one VisionEncoder.

    Each request is answered as soon as its own tiles are done, not when the whole batch is.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        write_to_server_log("vision_encoder")
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
                random_weights=settings.text("weights") == "random",
                picture_decoder=settings.text("picture_decoder"),
            ),
        )

    def execute(self, requests: list[Any]) -> None:
        started = time.monotonic_ns()
        items: list[VisionItem] = []
        stamps: list[list[int]] = []
        waiting: dict[int, Responder] = {}
        for request in requests:
            responder = Responder(request)
            try:
                earlier = read_stamps(request)
                if earlier and is_over(earlier[0]):  # its time ran out while it waited here: no work goes into it
                    responder.send(deadline_exceeded(earlier[1]), final=True)
                    continue
                items.append(self._encoder.checked(read_item(request)))
            except Exception as error:
                responder.send(error_response("vision_encoder", error), final=True)
                continue
            waiting[len(stamps)] = responder
            stamps.append(earlier)
        try:
            for index, rows in self._encoder.encode_each(items):
                if isinstance(rows, InvalidRequest):
                    response = error_response("vision_encoder", rows)
                else:
                    response = _response(rows, [*stamps[index], started, time.monotonic_ns()])
                waiting.pop(index).send(response, final=True)
        except Exception as error:
            for responder in waiting.values():
                responder.send(error_response("vision_encoder", error), final=True)


def read_stamps(request: Any) -> list[int]:
    """Deadline and times as preprocess gave them; none in a ping."""
    stamps = tensors.array(request, "STAMPS")
    if stamps is None:
        return []
    if stamps.size != STAMPS:
        raise InvalidRequest(f"STAMPS has {stamps.size} values; vision_encoder wants {STAMPS}")
    return stamps.reshape(-1).tolist()


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
        raise InvalidRequest("vision_encoder wants PIXELS, PLAN and DIGEST; clients talk to the ensemble 'vlm'")
    return VisionItem(pixels=pixels.reshape(-1), plan=plan.reshape(-1), digest=digest.reshape(-1))


def _response(rows: torch.Tensor | None, stamps: list[int]) -> Any:
    import triton_python_backend_utils as pb_utils

    outputs = [tensors.output("STAMPS", np.array([stamps], dtype=np.int64))]
    if rows is not None:
        # The tensor itself, not a capsule: only then are the streams of a GPU synchronised.
        outputs.append(pb_utils.Tensor.from_dlpack("EMBEDDINGS", rows.to(torch.bfloat16).contiguous()))
    return pb_utils.InferenceResponse(output_tensors=outputs)
