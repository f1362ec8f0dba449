"""The vision tower in torch: the readable twin of the exported graph, and the way onto other devices."""

from __future__ import annotations

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.vision.intern_vit import InternViT, load_vision


class TorchRunner:
    """Runs the tower in the dtype and on the device its weights have."""

    def __init__(self, tower: InternViT) -> None:
        self._tower = tower

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
        tower = load_vision(config, getattr(torch, dtype), random_weights)
        return cls(tower.to(device))

    def activation_bytes(self, tiles: int) -> int:
        return self._tower.activation_bytes(tiles)

    @torch.inference_mode()
    def run(self, tiles: np.ndarray | torch.Tensor) -> torch.Tensor:
        """uint8 [n, side, side, 3] -> [n, tokens per tile, hidden] in the weights' dtype."""
        device = self._tower.class_embedding.device
        source = tiles if isinstance(tiles, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(tiles))
        if device.type == "cuda" and not source.is_cuda:
            source = source.pin_memory()
        return self._tower(source.to(device, non_blocking=True))
