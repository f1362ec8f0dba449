"""How large the inputs of the tower's linear maps get, for quantising them: measured on pictures, kept as numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from onnx import TensorProto

from tessera.errors import ConfigError
from tessera.models.internvl.vision import InternViT

# The type of the stored numbers, and the largest of them.
KINDS = {"int8": (TensorProto.INT8, 127.0), "fp8": (TensorProto.FLOAT8E4M3FN, 448.0)}


@dataclass(frozen=True)
class Quantization:
    """``kind``: int8 or fp8 (E4M3). ``amax``: name of a linear map -> the input magnitude that maps to the largest
    number; larger inputs are cut off there."""

    kind: str
    amax: dict[str, float]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"quantisation {self.kind!r} is not known; known are {', '.join(KINDS)}")


def quantized_layers(tower: InternViT) -> dict[str, torch.nn.Linear]:
    """The linear maps that are quantised, by name: all of the layers, neither patch embedding nor projector."""
    modules = dict(tower.named_modules())
    names = ("attention.qkv", "attention.output", "mlp.linear1", "mlp.linear2")
    found = [f"layers.{number}.{name}" for number in range(tower.depth) for name in names]
    return {name: cast("torch.nn.Linear", modules[name]) for name in found}


@torch.inference_mode()
def calibrate(tower: InternViT, tiles: Iterable[torch.Tensor], kind: str) -> Quantization:
    """Run the tower on ``tiles`` (batches of uint8 [n, side, side, 3]) and note the largest of its linear inputs.

    Raises ConfigError without tiles.
    """
    amax: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        amax[name] = max(amax.get(name, 0.0), float(x.abs().max()))

    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in quantized_layers(tower).items()
    ]
    for batch in tiles:
        tower(batch)
    for handle in handles:
        handle.remove()
    if not amax:
        raise ConfigError("calibration needs at least one tile")
    return Quantization(kind, amax)
