"""A Python model of tritonserver that speaks the wire contract without a network: it echoes words.

The question says how to behave: ``slow ...`` takes 0.1 s a word, ``fail CODE words`` ends with that error. The last
word of an answer is a JSON object that tells what arrived, and at which GPU's server. Control requests are noted in
``cancelled.txt`` of the repository (``cancelled0.txt`` at the server of GPU 0); leases are held until then. (Were they
refused, tritonserver 2.51 would abort now and then, as a refusal met an answer on one stream.) Runs inside the server
only.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = (
    *("text_input", "messages", "image", "sampling_parameters", "stream", "exclude_input_in_output"),
    *("CANCEL", "LEASE"),
)


def config(name: str) -> str:
    """The config.pbtxt of one of the three toys."""
    inputs = [
        f'{{ name: "{field}" data_type: {"TYPE_BOOL" if field in FIELDS[4:6] else "TYPE_STRING"} '
        f"dims: [ {-1 if field == 'image' else 1} ] optional: true }}"
        for field in FIELDS
    ]
    kinds = {"usage": ("TYPE_INT32", 3), "timings": ("TYPE_FP32", 6)}
    outputs = [
        f'{{ name: "{field}" data_type: {kinds.get(field, ("TYPE_STRING", 1))[0]} '
        f"dims: [ {kinds.get(field, ('TYPE_STRING', 1))[1]} ] }}"
        for field in ("text_output", "finish_reason", "usage", "timings", "logprobs", "choices")
    ]
    decoupled = "false" if name == "vlm_unary" else "true"
    return (
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n'
        f"model_transaction_policy {{ decoupled: {decoupled} }}\n"
        f"input [ {', '.join(inputs)} ]\noutput [ {', '.join(outputs)} ]\n"
    )


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.decoupled = args["model_name"] != "vlm_unary"
        self.gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.leases: dict[str, Any] = {}
        self.notes = Path(args["model_repository"]).parent / f"cancelled{self.gpu}.txt"

    def execute(self, requests: list[Any]) -> None:
        import triton_python_backend_utils as pb_utils

        for request in requests:
            sender = request.get_response_sender()
            got = {}
            for tensor in request.inputs():
                got[tensor.name()] = tensor.as_numpy()
            if "LEASE" in got:
                self.leases[got["LEASE"][0].decode()] = sender
                continue
            if "CANCEL" in got:
                name = got["CANCEL"][0].decode()
                if (lease := self.leases.pop(name, None)) is not None:
                    lease.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    with open(self.notes, "a") as file:
                        file.write(name + "\n")
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            about = {"id": request.request_id(), "timeout": request.timeout(), "gpu": self.gpu}
            work = threading.Thread(target=self.answer, args=(sender, got, about))
            work.start()
            if not got["text_input"][0].startswith(b"slow"):
                work.join()

    def answer(self, sender: Any, got: dict[str, Any], about: dict[str, Any]) -> None:
        import triton_python_backend_utils as pb_utils

        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        words = got["text_input"][0].decode().split()
        if words[0] == "fail":
            failure = pb_utils.TritonError(" ".join(words[2:]), getattr(pb_utils.TritonError, words[1]))
            sender.send(pb_utils.InferenceResponse(error=failure), flags=final)
            return
        about["sizes"] = [len(picture) for picture in got.get("image", ())]
        about["sampling"] = json.loads(got["sampling_parameters"][0]) if "sampling_parameters" in got else None
        words.append(json.dumps(about))
        pieces = [f"{word} " for word in words] if self.decoupled and got["stream"][0] else [" ".join(words)]
        for i, piece in enumerate(pieces):
            if words[0] == "slow":
                time.sleep(0.1)
            last = i == len(pieces) - 1
            outputs = [
                pb_utils.Tensor("text_output", np.array([piece.encode()], np.object_)),
                pb_utils.Tensor("finish_reason", np.array([b"stop" if last else b""], np.object_)),
                pb_utils.Tensor("usage", np.array([7, len(words), 3] if last else [0, 0, 0], np.int32)),
                pb_utils.Tensor("timings", np.arange(6, dtype=np.float32)),
                pb_utils.Tensor("logprobs", np.array([b""], np.object_)),
                pb_utils.Tensor("choices", np.array([b""], np.object_)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs), flags=0 if self.decoupled else final)
        if self.decoupled:
            sender.send(flags=final)
