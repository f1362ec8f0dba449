"""How the vision stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.errors import ConfigError
from tessera.settings import check, setting

QUANTIZATIONS = {"checkpoint": "checkpoint", "fp8": "fp8", "fp8-language": "checkpoint", "fp8-vision": "fp8"}


@dataclass(frozen=True)
class VisionSettings:
    """The deployment's choices.

    ``runner``: onnx on the CPU, graph (CUDA graphs) on a GPU, torch as the readable twin of both and for towers that
    these do not take; ``threads`` in one forward; ``infer_batch_size`` bounds what the pictures of one forward cost
    (InternVL: tiles; Qwen2-VL: pictures of 616 x 616 pixels, however these are spread); ``cache_bytes`` bounds the
    rows kept of pictures seen before; with ``gpu_pixels`` pictures may come encoded, each of which may take
    ``decode_bytes`` of the GPU to decode; ``memory_bytes`` bounds all that the stage holds (encoding/memory.py: what
    that is), 0 nothing.

    ``quantization``: fp8 has the tower's linear layers quantized when they are loaded (runners/fp8_tower.py), and is
    refused where that changes the rows too much; checkpoint runs them in FP8 if they are stored so. On the CPU a tower
    in FP8 gives the rows that a GPU would, through the torch runner: no onnx graph holds it, and it is slower.

    ``tile_policy``: preprocess's, which says how large a picture may be that the tower takes whole; None: the
    checkpoint's.
    """

    runner: str = setting("onnx", cuda="graph", settable=False, choices=("onnx", "torch", "graph"))
    infer_batch_size: int = setting(4, cuda=16, name="visual_infer_batch_size", least=1)
    threads: int = setting(1, common=True, least=1)
    dtype: str = setting("float32", cuda="bfloat16", common=True, choices=("float32", "bfloat16", "float16"))
    quantization: str = setting("checkpoint", common=True, choices=QUANTIZATIONS)
    device: str = "cpu"
    random_weights: bool = setting(False, name="weights", common=True, choices={"checkpoint": False, "random": True})
    cache_bytes: int = setting(256 << 20, cuda=512 << 20, least=0)
    gpu_pixels: int = setting(0, common=True, least=0)
    decode_bytes: int = setting(2 << 30, settable=False, least=0)
    memory_bytes: int = setting(0, settable=False, least=0, share="vision")
    send_batch_size: int = setting(1, name="visual_send_batch_size", least=1)
    vision_url: str = setting("", divides=True)
    tile_policy: Any = None

    def __post_init__(self) -> None:
        check(self, "vision_encoder")
        if self.runner == "onnx" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ConfigError("the onnx runner computes in float32 on the CPU; for anything else use graph or torch")
        if self.runner == "graph" and not self.device.startswith("cuda"):
            raise ConfigError(f"the graph runner records CUDA graphs; it needs device cuda, not {self.device!r}")
        if self.gpu_pixels and not self.vision_url and not self.device.startswith("cuda"):
            raise ConfigError(f"gpu_pixels has pictures decoded on the GPU; it needs device cuda, not {self.device!r}")
