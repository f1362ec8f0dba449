"""What computes a forward: the contract, the runner that the settings ask for, and what it keeps."""

from typing import Protocol

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.errors import ConfigError
from tessera.models.tower import Tower, Wires, tower_class, unfilled_tower
from tessera.settings.stages import VisionSettings
from tessera.vision.fp8_tower import linears_in_fp8


class Runner(Protocol):
    """Used by one thread at a time. Runners on a GPU also take pixels that are there already, and return before it is
    done: pixels and rows are ready in the order of the current stream."""

    #: what it runs, perhaps without its weights
    tower: Tower
    #: a forward that costs at most this may run beside one that costs more, on another stream, but not beside another
    #: such; 0: none may
    beside: int
    #: how many times the setting ``infer_batch_size`` it takes at once
    at_once: int

    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        """What the tower's ``forward`` makes of them, the caller's to keep."""
        ...

    def activation_bytes(self, cost: int) -> int:
        """The device memory that a forward of so much allocates at most, rows included, known before it runs."""
        ...


def reserved_bytes(device: torch.device) -> int:
    """Of a GPU, what this process has; what it only kept for later is given back first. 0 on the CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def make_runner(config: CheckpointConfig, settings: VisionSettings) -> Runner:
    """Load the tower of a checkpoint. Raises CheckpointError or ConfigError saying what does not fit."""
    tower = tower_class(config)
    plain = settings.dtype == "float32" and not linears_in_fp8(config, settings)  # as the graphs are
    if settings.runner == "onnx" and tower.onnx_graph and plain:
        from tessera.vision.onnx_runner import MOST_BYTES, OnnxRunner

        if unfilled_tower(config).weight_bytes <= MOST_BYTES:
            return OnnxRunner.from_checkpoint(config, settings)
    if settings.quantization == "int8":
        raise ConfigError(f"no ONNX graph holds this {tower.__name__}, so none in int8: set quantization to checkpoint")
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
    kept = runner.tower.weight_bytes if device.type == "cpu" else reserved_bytes(device) - before
    return runner, kept
