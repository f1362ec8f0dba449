"""How the vision stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessera.errors import ConfigError


@dataclass(frozen=True)
class VisionSettings:
    """The deployment's choices.

    ``infer_batch_size`` tiles at most are one forward; ``threads`` inside one forward; ``onnx_path`` is the exported
    file (without one, the graph is written from the checkpoint at start); ``cache_bytes`` bounds the embeddings kept of
    pictures seen before; ``memory_bytes`` all that the stage holds (memory.py says what that is), 0 nothing.
    """

    runner: str = "onnx"
    infer_batch_size: int = 4
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    onnx_path: Path | None = None
    random_weights: bool = False
    cache_bytes: int = 256 * 2**20
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.runner not in ("onnx", "torch"):
            raise ConfigError(f"vision runner {self.runner!r} is not known; known are onnx, torch")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"vision dtype {self.dtype!r} is not known; known are float32, bfloat16, float16")
        if self.runner == "onnx" and (self.dtype, self.device) != ("float32", "cpu"):
            raise ConfigError("the onnx runner computes in float32 on the CPU; use runner torch for anything else")
        if self.infer_batch_size < 1 or self.threads < 1 or self.cache_bytes < 0 or self.memory_bytes < 0:
            raise ConfigError(
                "the vision stage needs infer_batch_size >= 1, threads >= 1, cache_bytes >= 0 and memory_bytes >= 0, "
                f"not {self.infer_batch_size}, {self.threads}, {self.cache_bytes} and {self.memory_bytes}"
            )
