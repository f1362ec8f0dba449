"""What computes a forward: the contract, and which one the settings ask for."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.settings import VisionSettings


class Runner(Protocol):
    """uint8 [n, side, side, 3], an array or (with a picture decoder) a tensor -> rows [n, tokens per tile, hidden]."""

    def run(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor: ...


def make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
    if settings.runner == "onnx":
        from tessera.vision.onnx_runner import OnnxRunner

        return OnnxRunner.from_checkpoint(config, settings.onnx_path, settings.threads, settings.random_weights)
    from tessera.vision.torch_runner import TorchRunner

    return TorchRunner.from_checkpoint(
        config, settings.dtype, settings.threads, settings.device, settings.random_weights
    )
