"""The front `vlm_unary`: one request, one whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tessera.fronts.front import OUTPUTS, Front
from tessera.tritonserver import tensors
from tessera.tritonserver.failures import failure, relayed
from tessera.tritonserver.responder import Responder


class TritonPythonModel(Front):
    """Asks the ensemble not to stream and hands its one response on."""

    def inputs(self, request: Any) -> list[Any]:
        import triton_python_backend_utils as pb_utils

        kept = [tensor for tensor in super().inputs(request) if tensor.name() != "stream"]
        return [*kept, pb_utils.Tensor("stream", np.array([False]))]

    def pong(self, responder: Responder) -> None:
        import triton_python_backend_utils as pb_utils

        responder.send(pb_utils.InferenceResponse([tensors.text_output("finish_reason", "")]), final=True)

    def relay(self, responses: Iterator[Any], responder: Responder) -> None:
        import triton_python_backend_utils as pb_utils

        answer = None
        for response in responses:
            if response.has_error():
                answer = relayed(response.error().message())
            elif response.output_tensors():
                answer = pb_utils.InferenceResponse(output_tensors=own_tensors(response))
        if answer is None:
            answer = failure("CANCELLED", "the request was cancelled")
        responder.send(answer, final=True)


def own_tensors(response: Any) -> list[Any]:
    """The response's outputs in the front's own order."""
    import triton_python_backend_utils as pb_utils

    found = (pb_utils.get_output_tensor_by_name(response, name) for name in OUTPUTS)
    return [tensor for tensor in found if tensor is not None]
