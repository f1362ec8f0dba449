"""The front `vlm_stream`: relays the ensemble's stream and stops the work when the client goes away."""

from __future__ import annotations

from typing import Any

from tessera.tritonserver import tensors
from tessera.tritonserver.fronts import Front, response
from tessera.tritonserver.responder import Responder


class TritonPythonModel(Front):
    """Relays each response as it comes."""

    def wants_stream(self, request: Any) -> bool:
        return tensors.flag(request, "stream", True)

    def pong(self, responder: Responder) -> None:
        responder.finish()

    def relay(self, message: Any, responder: Responder) -> None:
        if message is None:
            responder.finish()
        else:
            responder.send(response(message), final=False)
