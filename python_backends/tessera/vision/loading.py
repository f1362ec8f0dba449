"""The runner that the settings ask for, and what it keeps."""

from __future__ import annotations

import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.models.tower import tower_class
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import linears_in_fp8
from tessera.vision.runner import Runner, reserved_bytes, weight_bytes


def make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
    tower = tower_class(config)
    if settings.runner == "onnx" and tower.onnx_graph and not linears_in_fp8(config, settings):  # which no graph holds
        from tessera.vision.onnx_runner import MOST_BYTES, OnnxRunner

        if weight_bytes(config, settings) <= MOST_BYTES:
            return OnnxRunner.from_checkpoint(config, settings)
    if settings.runner == "graph" and tower.splits:  # no graph is recorded of pictures of any size
        from tessera.vision.torch_runner import GraphRunner

        return GraphRunner.from_checkpoint(config, settings)
    from tessera.vision.torch_runner import TorchRunner

    return TorchRunner.from_checkpoint(config, settings)


def load_runner(config: CheckpointConfig, settings: VisionSettings) -> tuple[Runner, int]:
    """As :func:`make_runner`, with the bytes that the runner keeps: weights, on a GPU graphs and buffers as well."""
    device = torch.device(settings.device)
    before = reserved_bytes(device)
    runner = make_runner(config, settings)
    kept = weight_bytes(config, settings) if device.type == "cpu" else reserved_bytes(device) - before
    return runner, kept
