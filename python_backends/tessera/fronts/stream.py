"""The front `vlm_stream`: relays the ensemble's stream and stops the work when the client goes away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tessera.fronts.front import Front
from tessera.fronts.unary import own_tensors
from tessera.tritonserver.failures import relayed
from tessera.tritonserver.responder import Responder


class TritonPythonModel(Front):
    """Relays each response as it comes."""

    def pong(self, responder: Responder) -> None:
        responder.finish()

    def relay(self, responses: Iterator[Any], responder: Responder) -> None:
        import triton_python_backend_utils as pb_utils

        for response in responses:
            if response.has_error():
                responder.send(relayed(response.error().message()), final=True)
            elif response.output_tensors():
                responder.send(pb_utils.InferenceResponse(output_tensors=own_tensors(response)), final=False)
        responder.finish()
