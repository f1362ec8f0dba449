"""A stage that answers small requests as the vision stage does: two senders, pings, metrics, the log, GPU tensors."""

import ctypes
import itertools
import logging
import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tessera.tritonserver import metrics, tensors
from tessera.tritonserver.gpu_pool import answer_warm_up
from tessera.tritonserver.metrics import Counter, Gauge, Renewed, write_to_server_log
from tessera.tritonserver.responder import Channel, Outbox, Responder

metrics.RENEW_SECONDS = float(os.environ["STUB_RENEW_S"])
GPU, FLOAT = 2, 2  # dlpack's kDLCUDA and kDLFloat


class Tensor(ctypes.Structure):
    """dlpack's DLManagedTensor."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)),
        *(("context", ctypes.c_void_p), ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))),
    ]


NEW_CAPSULE = ctypes.pythonapi.PyCapsule_New
NEW_CAPSULE.restype, NEW_CAPSULE.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
HELD: dict[int, Any] = {}
LET_GO = Tensor._fields_[-1][1](lambda address: HELD.pop(address, None))


class OnGpu:
    """float32 [1, n] that says it lies on GPU 0."""

    device = "a GPU that is none"

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        return GPU, 0

    def __dlpack__(self, stream: Any = None) -> Any:
        shape = (ctypes.c_int64 * 2)(*self.values.shape)
        where = self.values.ctypes.data
        made = Tensor(where, GPU, 0, 2, FLOAT, 32, 1, ctypes.addressof(shape), None, 0, None, LET_GO)
        HELD[ctypes.addressof(made)] = made, shape, self.values
        return NEW_CAPSULE(ctypes.addressof(made), b"dltensor", None)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        write_to_server_log("stub")
        self.log = logging.getLogger("tessera.stub")
        self.outbox = Outbox("stub", threads=2)
        self.channels = itertools.cycle([Channel(self.answer), Channel(self.answer)])
        self.count = 0
        gauge, counter = Gauge("stub_requests", "Requests"), Counter("stub_requests_total", "Requests")

        def renew() -> None:
            gauge.set(self.count, kind=str(self.count % 7))
            counter.raise_to(self.count)

        self.page = Renewed(renew)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            responder = Responder(request)
            if tensors.text(request, "PING") == "":
                answer_warm_up(responder, "OUT", OnGpu(np.zeros((1, 1), np.float32)))  # type: ignore[arg-type]
                continue
            self.count += 1
            self.log.info("request %d", self.count)
            self.outbox.post(next(self.channels), responder)

    def answer(self, responders: list[Responder]) -> None:
        for responder in responders:
            responder.is_cancelled()
            rows = pb_utils.Tensor.from_dlpack("OUT", OnGpu(np.ones((1, 16), np.float32)))
            stamps = tensors.output("STAMPS", np.zeros((1, 5), np.int64))
            responder.send(pb_utils.InferenceResponse([rows, stamps]), final=True)
