"""The front `vlm_stream`: relays the ensemble's stream and stops the work when the client goes away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tessera.fronts.front import Front, response
from tessera.tritonserver import tensors
from tessera.tritonserver.responder import Responder
from tessera_client.messages import Delta


class TritonPythonModel(Front):
    """Relays each response as it comes."""

    def wants_stream(self, request: Any) -> bool:
        return tensors.flag(request, "stream", True)

    def pong(self, responder: Responder) -> None:
        responder.finish()

    def relay(self, deltas: Iterable[Delta], responder: Responder) -> None:
        for delta in deltas:
            responder.send(response(delta), final=False)
        responder.finish()
