"""The vision tower in torch: the readable twin of the exported graph, and the way onto other devices."""

from __future__ import annotations

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.intern_vit import InternViT, load_vision
from tessera.vision.memory import activation_bytes


class TorchRunner:
    """Runs the tower in the dtype and on the device its weights have. ``bytes_per_tile``: activations of a forward."""

    def __init__(self, tower: InternViT, bytes_per_tile: int = 0) -> None:
        self._tower = tower
        self._bytes_per_tile = bytes_per_tile

    @classmethod
    def from_checkpoint(
        cls,
        config: CheckpointConfig,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        random_weights: bool = False,
    ) -> TorchRunner:
        """``threads`` is torch's thread count, which holds for the whole process; only the CPU uses it."""
        if device == "cpu":
            torch.set_num_threads(threads)
        kind = getattr(torch, dtype)
        tower = load_vision(config, kind, random_weights)
        return cls(tower.to(device), activation_bytes(config, 1, kind.itemsize, scores=False))

    @torch.inference_mode()
    def run(self, tiles: np.ndarray) -> torch.Tensor:
        """uint8 [n, side, side, 3] -> [n, tokens per tile, hidden] in the weights' dtype."""
        device = self._tower.class_embedding.device
        pixels = torch.from_numpy(np.ascontiguousarray(tiles))
        if device.type == "cuda":
            pixels = pixels.pin_memory()
        return self._tower(pixels.to(device, non_blocking=True))

    def activation_bytes(self, tiles: int) -> int:
        return tiles * self._bytes_per_tile
