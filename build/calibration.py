"""How large the inputs of the tower's linear maps get, for quantising them: measured on pictures, kept as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from onnx import TensorProto

from tessera.errors import ConfigError
from tessera.vision.towers.intern_vit import InternViT

KINDS = {"int8": (TensorProto.INT8, 127.0), "fp8": (TensorProto.FLOAT8E4M3FN, 448.0)}
_BINS = 4096


@dataclass(frozen=True)
class Quantization:
    """``kind``: int8 or fp8 (E4M3). ``amax``: name of a linear map -> the input magnitude that maps to the largest
    number; larger inputs are cut off there."""

    kind: str
    amax: dict[str, float]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"quantisation {self.kind!r} is not known; known are {', '.join(KINDS)}")

    @property
    def element_type(self) -> int:
        return KINDS[self.kind][0]

    @property
    def largest(self) -> float:
        return KINDS[self.kind][1]


def quantized_layers(tower: InternViT) -> dict[str, torch.nn.Linear]:
    """The linear maps that are quantised, by name: all of the layers, neither patch embedding nor projector."""
    modules = dict(tower.named_modules())
    names = ("attention.qkv", "attention.output", "mlp.linear1", "mlp.linear2")
    found = [f"layers.{number}.{name}" for number in range(tower.depth) for name in names]
    return {name: cast("torch.nn.Linear", modules[name]) for name in found}


@torch.inference_mode()
def calibrate(tower: InternViT, tiles: Iterable[torch.Tensor], kind: str, percentile: float = 100.0) -> Quantization:
    """Run the tower on ``tiles`` (batches of uint8 [n, side, side, 3]) and note the magnitudes of its linear inputs.

    ``percentile`` below 100 cuts off the largest of them: what lies above it is clipped, what lies below it gets the
    finer steps. Raises ConfigError without tiles.
    """
    layers = quantized_layers(tower)
    batches = list(tiles)
    if not batches:
        raise ConfigError("calibration needs at least one tile")

    def watch(see: Callable[[str, torch.Tensor], None]) -> None:
        """Run all batches and show ``see`` each layer's input magnitudes."""
        handles = [
            layer.register_forward_pre_hook(lambda _, inputs, name=name: see(name, inputs[0].abs().flatten()))
            for name, layer in layers.items()
        ]
        for batch in batches:
            tower(batch)
        for handle in handles:
            handle.remove()

    largest = {name: 0.0 for name in layers}

    def note_largest(name: str, magnitudes: torch.Tensor) -> None:
        largest[name] = max(largest[name], float(magnitudes.max()))

    watch(note_largest)
    if percentile >= 100:
        return Quantization(kind, largest)
    counts = {name: torch.zeros(_BINS, dtype=torch.float64) for name in layers}

    def count(name: str, magnitudes: torch.Tensor) -> None:
        counts[name] += torch.histc(magnitudes, _BINS, 0.0, largest[name])

    watch(count)
    amax = {}
    for name, histogram in counts.items():
        wanted = percentile / 100 * histogram.sum()
        reached = int(torch.searchsorted(histogram.cumsum(0), wanted))
        amax[name] = largest[name] * (min(reached, _BINS - 1) + 1) / _BINS
    return Quantization(kind, amax)
