"""How the vision stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessera.errors import ConfigError
from tessera.settings import check, setting


@dataclass(frozen=True)
class VisionSettings:
    """The deployment's choices.

    ``runner``: onnx on the CPU, graph (CUDA graphs) on a GPU, torch as the readable twin of both;
    ``threads`` inside one forward; ``onnx_path`` is the exported file (without one, the graph is written from
    the checkpoint at start); ``infer_batch_size`` tiles at most are one forward; ``cache_bytes`` bounds the embeddings
    kept of pictures seen before; ``picture_decoder`` decodes the pictures that travel encoded, each of which may take
    ``decode_bytes``; ``memory_bytes`` bounds all that the stage holds (memory.py says what that is), 0 nothing.
    """

    runner: str = setting("onnx", cuda="graph", choices=("onnx", "torch", "graph"))
    infer_batch_size: int = setting(4, cuda=32, name="visual_infer_batch_size", least=1)
    threads: int = setting(1, common=True, least=1)
    dtype: str = setting("float32", cuda="bfloat16", common=True, choices=("float32", "bfloat16", "float16"))
    device: str = "cpu"
    random_weights: bool = setting(False, name="weights", common=True, choices={"checkpoint": False, "random": True})
    cache_bytes: int = setting(256 << 20, least=0)
    picture_decoder: str = setting("none", settable=False, choices=("none", "nvjpeg"))
    gpu_pixels: int = setting(0, common=True, least=0)
    decode_bytes: int = setting(2 << 30, settable=False, least=0)
    memory_bytes: int = setting(0, least=0, share="vision")
    send_batch_size: int = setting(1, name="visual_send_batch_size", least=1)
    vision_url: str = setting("")
    onnx_path: Path | None = None

    def __post_init__(self) -> None:
        check(self, "vision_encoder")
        if self.gpu_pixels and self.picture_decoder == "none":
            object.__setattr__(self, "picture_decoder", "nvjpeg")
        if self.runner == "onnx" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ConfigError("the onnx runner computes in float32 on the CPU; for anything else use graph or torch")
        if self.runner == "graph" and not self.device.startswith("cuda"):
            raise ConfigError(f"the graph runner records CUDA graphs; it needs device cuda, not {self.device!r}")
        if self.picture_decoder == "nvjpeg" and not self.device.startswith("cuda"):
            raise ConfigError(f"picture_decoder nvjpeg (gpu_pixels) needs device cuda, not {self.device!r}")
