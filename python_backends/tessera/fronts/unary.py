"""The front `vlm_unary`: one request, one whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tessera.fronts.front import Front, response
from tessera.tritonserver import tensors
from tessera.tritonserver.failures import failure
from tessera.tritonserver.responder import Responder
from tessera_client.messages import Delta


class TritonPythonModel(Front):
    """Asks the ensemble not to stream and hands its one response on."""

    def wants_stream(self, request: Any) -> bool:
        return False

    def pong(self, responder: Responder) -> None:
        import triton_python_backend_utils as pb_utils

        responder.send(pb_utils.InferenceResponse([tensors.text_output("finish_reason", "")]), final=True)

    def relay(self, deltas: Iterable[Delta], responder: Responder) -> None:
        answers = list(deltas)
        responder.send(
            response(answers[-1]) if answers else failure("INTERNAL", "the ensemble gave no answer"), final=True
        )
