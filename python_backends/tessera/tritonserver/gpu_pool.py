"""A stage's first tensor on a GPU, walled off from a hazard of this server.

With the first such tensor that a stage's process sends or receives, tritonserver shares its pool of GPU memory with it,
by a message in the shared memory of the two. It frees that message and then writes one more byte to it
(``ShareCUDAMemoryPool`` in stub_launcher.cc, release 24.10). If that memory was allocated again in between, its content
is damaged; if it became the allocator's own account of its blocks, the stage or the server crashes some requests later
with the memory's lock held, and the other one dies of ``boost::interprocess::lock_exception``, or both stand still. The
first burst of pictures is such a moment: the server copies requests in while the stage sends.

So the stage sends that tensor while nothing else allocates there: in answer to the request that `model_warmup` in
config.pbtxt has the server make before the stage is ready (a PING with an empty word; the server skips a warm-up whose
batch_size is 0, also where a model takes no batches), and before its execute() returns. The server waits for that,
there is no other request, and what speaks with the server unasked, the metrics and the log, waits for SPEAKING.
"""

import logging

import torch

from tessera.tritonserver import backend
from tessera.tritonserver.failures import SPEAKING
from tessera.tritonserver.responder import Responder

_LOG = logging.getLogger(__name__)


def answer_warm_up(responder: Responder, name: str, tensor: torch.Tensor) -> None:
    """Answers the request of `model_warmup`; to be called in execute().

    Args:
        responder: of that request.
        name: an output of the model, of the tensor's dtype.
        tensor: zeros, on the device that the stage's tensors are on.
    """
    with SPEAKING:
        _LOG.info("sends its first tensor, on %s", tensor.device)
        responder.is_cancelled()  # is queued behind the log's lines: when it comes back, they have gone
        responder.send(backend().InferenceResponse([backend().Tensor.from_dlpack(name, tensor)]), final=True)
