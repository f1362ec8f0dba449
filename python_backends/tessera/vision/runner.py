"""What computes a forward: the contract, and which one the settings ask for."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.intern_vit import InternViT
from tessera.vision.settings import VisionSettings


class Runner(Protocol):
    def run(self, tiles: np.ndarray) -> torch.Tensor:
        """uint8 [n, side, side, 3] -> rows [n, tokens per tile, hidden].

        On a GPU it works on the current stream and returns without waiting for it: the next forward is launched while
        this one runs. So ``tiles`` are read before it returns and go up through pinned memory (a copy from any other
        waits for the stream), and no later run writes into the rows.
        """
        ...

    def activation_bytes(self, tiles: int) -> int:
        """What a forward of so many tiles allocates at most, rows included; known before it runs."""
        ...


def make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
    if settings.runner == "onnx":
        from tessera.vision.onnx_runner import OnnxRunner

        return OnnxRunner.from_checkpoint(config, settings.onnx_path, settings.threads, settings.random_weights)
    from tessera.vision.torch_runner import TorchRunner

    return TorchRunner.from_checkpoint(
        config, settings.dtype, settings.threads, settings.device, settings.random_weights
    )


def load_runner(config: CheckpointConfig, settings: VisionSettings) -> tuple[Runner, int]:
    """As :func:`make_runner`, with the bytes that the runner keeps: weights, on a GPU graphs and buffers as well."""
    if settings.device == "cpu":
        return make_runner(config, settings), weight_bytes(config, settings)
    before = _reserved()
    runner = make_runner(config, settings)
    return runner, _reserved() - before


def weight_bytes(config: CheckpointConfig, settings: VisionSettings) -> int:
    """What the tower's weights take, from the shapes alone."""
    with torch.device("meta"):
        tower = InternViT(config)
    return getattr(torch, settings.dtype).itemsize * sum(parameter.numel() for parameter in tower.parameters())


def _reserved() -> int:
    """Bytes of the GPU that this process has; what it only kept for later is given back first."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
