"""Which kernels a model uses on this GPU: measured on its own weights and shapes before the first request.

For each shape of linear layer its scheme asks which product is the fastest for how many rows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tessera import kernels
from tessera.kernels.tuning import MeasuredChoices, choices_path, graph_milliseconds
from tessera.linear import measured, unquantized
from tessera.linear.scheme import Linear, LinearShape, Place
from tessera.models.text.qwen2 import DecoderLayer, Qwen2


def tune(model: Qwen2, device: torch.device, most_rows: int) -> None:
    """Lets the layers' schemes choose, on a GPU.

    ``most_rows``: of a step. The cache has left the memory of such a step free, and no layer takes more by itself.
    """
    choices = MeasuredChoices(choices_path(), graph_milliseconds)
    machine = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, kernels {kernels_version()}"
    for shape, layers in layers_alike(model):
        layers[0].scheme.tune(layers, replace(shape, most_rows=most_rows), choices, machine)


def kernels_version() -> str:
    """Eight digits that change with the text of our kernels, and of how they are measured."""
    files = sorted(Path(str(kernels.__file__)).parent.glob("*.py"))
    files += [Path(str(module.__file__)) for module in (measured, measured, unquantized)]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def layers_alike(model: Qwen2) -> list[tuple[LinearShape, list[Linear]]]:
    """The layers that have the same choices, which are of one shape, and hold the same kind of weights.

    Of one shape only some may be packed, have scattered columns, or still have found room for an FP8 copy.
    """
    places: dict[nn.Module, Place] = {}
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):
            places |= {layer.qkv: "qkv", layer.output: "output", layer.gate_up: "gate_up", layer.down: "down"}
    groups: dict[tuple[LinearShape, str, tuple[str, ...]], list[Linear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, Linear):
            place = places.get(layer, "alone")
            shape = LinearShape(layer.out_features, layer.in_features, layer.has_bias, place, layer.dtype)
            groups[shape, layer.scheme.in_words(layer), layer.held].append(layer)
    return [(shape, layers) for (shape, *_), layers in groups.items()]
