"""The front `vlm_unary`: one request, one whole answer."""

from __future__ import annotations

from typing import Any

from tessera.tritonserver import tensors
from tessera.tritonserver.failures import failure
from tessera.tritonserver.fronts import Front, response
from tessera.tritonserver.responder import Responder


class TritonPythonModel(Front):
    """Asks the ensemble not to stream and hands its one response on."""

    def wants_stream(self, request: Any) -> bool:
        return False

    def pong(self, responder: Responder) -> None:
        import triton_python_backend_utils as pb_utils

        responder.send(pb_utils.InferenceResponse([tensors.text_output("finish_reason", "")]), final=True)

    def relay(self, message: Any, responder: Responder) -> None:
        if message is not None:
            responder.send(response(message), final=True)
        else:  # not sent where the answer was
            responder.send(failure("INTERNAL", "the ensemble gave no answer"), final=True)
