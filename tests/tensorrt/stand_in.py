"""The vision stage of the config `tensorrt` without TensorRT: same inputs, same outputs, the same graph on the CPU.

Stands in for the plan in tests on the real tritonserver; lies in the model's version folder as stand_in.py.
"""

from pathlib import Path

import numpy as np
import onnx
import torch
import triton_python_backend_utils as pb_utils
from check_graph import for_cpu

from tessera.vision.onnx_runner import OnnxRunner


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        graph = onnx.load(str(Path(args["model_repository"]) / "1" / "typed.onnx"))
        self._runner = OnnxRunner(for_cpu(graph).SerializeToString())

    def execute(self, requests: list) -> list:
        tiles = [pb_utils.get_input_tensor_by_name(request, "TILES").as_numpy() for request in requests]
        rows = self._runner.run(np.concatenate(tiles)).to(torch.bfloat16)
        rows = rows.view(sum(map(len, tiles)), -1, rows.shape[-1])  # as a plan gives them: tile by tile
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("EMBEDDINGS", part.contiguous())])
            for part in rows.split([len(part) for part in tiles])
        ]
