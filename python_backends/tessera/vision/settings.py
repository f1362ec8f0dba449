"""How the vision stage runs."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import ConfigError


@dataclass(frozen=True)
class VisionSettings:
    """The deployment's choices.

    ``runner``: onnx on the CPU, graph (CUDA graphs) on a GPU, torch as the readable twin of both;
    ``threads`` inside one forward; ``infer_batch_size`` bounds what the pictures of one forward cost (tiles, patches);
    ``cache_bytes`` bounds the embeddings kept of pictures seen before; on a GPU a picture that travels encoded may take
    ``decode_bytes`` to decode, 0 refuses them all; ``memory_bytes`` bounds all that the stage holds (encoding/memory.py
    says what that is), 0 nothing.
    """

    runner: str = "onnx"
    infer_batch_size: int = 4
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    random_weights: bool = False
    cache_bytes: int = 256 * 2**20
    decode_bytes: int = 2**31
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.runner not in ("onnx", "torch", "graph"):
            raise ConfigError(f"vision runner {self.runner!r} is not known; known are onnx, torch, graph")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"vision dtype {self.dtype!r} is not known; known are float32, bfloat16, float16")
        if self.runner == "onnx" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ConfigError("the onnx runner computes in float32 on the CPU; for anything else use graph or torch")
        if self.runner == "graph" and not self.device.startswith("cuda"):
            raise ConfigError(f"the graph runner records CUDA graphs; it needs device cuda, not {self.device!r}")
        least_of = {"infer_batch_size": 1, "threads": 1, "cache_bytes": 0, "decode_bytes": 0, "memory_bytes": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(f"the vision stage needs {name} >= {least}, not {getattr(self, name)}")
