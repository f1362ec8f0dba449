"""What computes a forward: the contract, and which one the settings ask for."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.intern_vit import unfilled_tower
from tessera.vision.settings import VisionSettings


class Runner(Protocol):
    """uint8 [n, side, side, 3] -> rows [n, tokens per tile, hidden], the caller's to keep.

    Used by one thread at a time. Runners on a GPU also take tiles that are there already, and return before it is
    done: tiles and rows are ready in the order of the current stream.
    """

    def run(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor: ...

    def activation_bytes(self, tiles: int) -> int:
        """The device memory that a forward of so many tiles allocates at most, rows included, known before it runs."""
        ...


def make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
    if settings.runner == "onnx":
        from tessera.vision.onnx_runner import OnnxRunner

        return OnnxRunner.from_checkpoint(config, settings.onnx_path, settings.threads, settings.random_weights)
    if settings.runner == "graph":
        from tessera.vision.graph_runner import GraphRunner

        return GraphRunner.from_checkpoint(
            config, settings.dtype, settings.device, settings.infer_batch_size, settings.random_weights
        )
    from tessera.vision.torch_runner import TorchRunner

    return TorchRunner.from_checkpoint(
        config, settings.dtype, settings.threads, settings.device, settings.random_weights
    )


def load_runner(config: CheckpointConfig, settings: VisionSettings) -> tuple[Runner, int]:
    """As :func:`make_runner`, with the bytes that the runner keeps: weights, on a GPU graphs and buffers as well."""
    if settings.device == "cpu":
        return make_runner(config, settings), weight_bytes(config, settings)
    before = _reserved(settings.device)
    runner = make_runner(config, settings)
    return runner, _reserved(settings.device) - before


def weight_bytes(config: CheckpointConfig, settings: VisionSettings) -> int:
    """What the tower's weights take, from the shapes alone."""
    tower = unfilled_tower(config, getattr(torch, settings.dtype))
    return sum(parameter.nbytes for parameter in tower.parameters())


def _reserved(device: str) -> int:
    """Bytes of the GPU that this process has; what it only kept for later is given back first."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
