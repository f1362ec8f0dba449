"""A vision tower in torch: the readable twin of the exported graph, the way onto other devices, and for towers of which
no graph is recorded the way onto a GPU, with the kernels that are the fastest there."""

from __future__ import annotations

import numpy as np
import torch

from tessera.checkpoint.config import CheckpointConfig
from tessera.measured_choices import MeasuredChoices, choices_path, graph_milliseconds
from tessera.vision.kernels.upload import uploaded
from tessera.vision.runners.fp8_tower import serving_tower
from tessera.vision.runners.runner import Wires
from tessera.vision.settings import VisionSettings
from tessera.vision.towers.tower import Forward, Tower


class TorchRunner:
    """Runs the tower in the dtype and on the device its weights have, by ``forward`` or the tower's own."""

    beside = 0

    def __init__(self, tower: Tower, forward: Forward | None = None) -> None:
        self.tower = tower
        self._forward: Forward = forward or tower
        self.device = next(tower.parameters()).device

    @classmethod
    def from_checkpoint(cls, config: CheckpointConfig, settings: VisionSettings) -> TorchRunner:
        """The settings' threads are torch's, which holds for the whole process: on a GPU they copy into pinned memory,
        and spin where they find no core. Kernels are measured if the settings' runner is graph, for what has none."""
        torch.set_num_threads(settings.threads)
        tower = serving_tower(config, settings)
        if settings.runner != "graph":
            return cls(tower)
        choices = MeasuredChoices(choices_path(), graph_milliseconds)
        return cls(tower, tower.tuned(settings.infer_batch_size * tower.batch_unit, choices))

    def activation_bytes(self, cost: int) -> int:
        return self.tower.activation_bytes(cost)

    @torch.inference_mode()
    def run(self, pixels: np.ndarray | torch.Tensor, wires: Wires = ()) -> torch.Tensor:
        return self._forward(uploaded(pixels, self.device), wires)
