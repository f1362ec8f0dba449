"""A vision tower in torch: the readable twin of the exported graph, and the way onto other devices."""

from __future__ import annotations

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.runners.fp8_tower import serving_tower
from tessera.vision.runners.runner import Wires
from tessera.vision.settings import VisionSettings
from tessera.vision.towers.tower import Tower


class TorchRunner:
    """Runs the tower in the dtype and on the device its weights have."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self.device = next(tower.parameters()).device

    @classmethod
    def from_checkpoint(cls, config: CheckpointConfig, settings: VisionSettings) -> TorchRunner:
        """On the CPU the settings' threads are torch's, which holds for the whole process."""
        if settings.device == "cpu":
            torch.set_num_threads(settings.threads)
        return cls(serving_tower(config, settings))

    def activation_bytes(self, cost: int) -> int:
        return self.tower.activation_bytes(cost)

    @torch.inference_mode()
    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        return self.tower(uploadable(pixels, self.device).to(self.device, non_blocking=True), wires)


def uploadable(pixels: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that a GPU can fetch by itself; torch keeps a pinned block until the copies out of it are done."""
    source = pixels if isinstance(pixels, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(pixels))
    return source.pin_memory() if device.type == "cuda" and not source.is_cuda else source
