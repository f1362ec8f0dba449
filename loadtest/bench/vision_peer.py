"""transformers' own vision tower and projector, with the same weights as ours, to compare with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tessera.checkpoint.config import CheckpointConfig
from tessera.models.registry import read_config


class Peer:
    """transformers' InternVLModel up to the projected rows, in eager mode (its default attention: torch's SDPA)."""

    def __init__(self, model: Any, config: CheckpointConfig) -> None:
        self.model = model.eval().requires_grad_(False)
        self._statistics = config.vision.pixel_mean, config.vision.pixel_std

    def values(self, tiles: torch.Tensor) -> torch.Tensor:
        """uint8 [n, side, side, 3] -> what its processor makes of them: [n, 3, side, side] of the model's dtype."""
        mean, std = (torch.tensor(numbers, device=tiles.device) for numbers in self._statistics)
        return ((tiles.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous().to(self.model.dtype)

    @torch.inference_mode()
    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """[n, tokens per tile, text hidden]"""
        layer = self.model.config.vision_feature_layer
        return self.model.get_image_features(
            values, vision_feature_layer=layer, vision_feature_select_strategy="default"
        ).pooler_output

    def rows_of(self, tiles: torch.Tensor) -> torch.Tensor:
        """Any number of uint8 tiles -> their rows, computed few at a time."""
        return torch.cat([self.rows(self.values(few)) for few in tiles.split(8)])


def load_peer(checkpoint: Path, folder: Path) -> tuple[Peer, CheckpointConfig]:
    """The peer on the CPU in float32, and the configuration of a checkpoint with its weights.

    A checkpoint without weights gets random ones, which are written to ``folder`` with the rest of the checkpoint. Its
    text model is left out.
    """
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLModel

    if (checkpoint / "model.safetensors").exists():
        whole = InternVLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        config = read_config(checkpoint)
        return Peer(whole.model, config), config
    settings = InternVLConfig.from_pretrained(checkpoint)
    text = settings.text_config
    text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]
    text.intermediate_size = text.vocab_size = 64
    model = InternVLModel(settings).float()
    _draw(model)
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, folder)
    vision = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("language_model.")}
    save_file(vision, folder / "model.safetensors")
    config = read_config(folder)
    return Peer(model, config), config


def _draw(model: torch.nn.Module) -> None:
    """Random values for everything, also for what a fresh model has zeros or ones in; layer scales stay small."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("language_model."):
                continue
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.1 if ".lambda_" in name else 0.0
            parameter.normal_(middle, 0.02, generator=generator)
