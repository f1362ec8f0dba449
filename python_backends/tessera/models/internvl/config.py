"""What both layouts of InternVL describe: the tower (InternViT and its projector) and how pictures become tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tessera.checkpoint.files import check_number, check_sizes, one_of
from tessera.checkpoint.normalization import IMAGENET_MEAN, IMAGENET_STD, Channels
from tessera.errors import CheckpointError

_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "silu")
# What the tower does: any other value is refused by name.
_SUPPORTED = {
    "norm_type": ("layer_norm", "rms_norm"),
    "hidden_act": _ACTIVATIONS,
    "projector_hidden_act": _ACTIVATIONS,
    "ps_version": ("v1", "v2"),
    "num_channels": (3,),
}


@dataclass(frozen=True)
class VisionConfig:
    """InternViT, pixel shuffle and projector. Sizes in pixels; ``image_size`` is the side of the square tiles.

    ``feature_layer`` counts hidden states as the reference does: -1 is the output of the last layer. ``final_norm``
    says that a LayerNorm follows that one (transformers' ``use_mean_pooling: false``). The tower sees
    (x / 255 - ``pixel_mean``) / ``pixel_std``, a channel each. Defaults: transformers ``configuration_internvl.py``.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    image_size: int = 448
    patch_size: int = 14
    hidden_act: str = "gelu"
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    num_channels: int = 3
    final_norm: bool = False
    feature_layer: int = -1
    downsample_ratio: float = 0.5
    ps_version: str = "v2"
    projector_hidden_act: str = "gelu"
    pixel_mean: Channels = IMAGENET_MEAN
    pixel_std: Channels = IMAGENET_STD

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_tile(self) -> int:
        """Rows of embeddings that one tile becomes."""
        return int(self.patches_per_side * self.downsample_ratio) ** 2


@dataclass(frozen=True)
class TileRule:
    """Between how many tiles a grid has, whether a ``thumbnail`` follows ("auto": behind several tiles; or "never"),
    and the ``order`` in which grids of as many tiles are tried: "columns" first, or that of a Python "set"."""

    min_tiles: int
    max_tiles: int
    thumbnail: str
    order: str


def read_vision(stated: Mapping[str, Any], where: str) -> VisionConfig:
    """The tower by the names of VisionConfig's fields. Raises CheckpointError that begins with ``where``."""
    values = {field.name: stated.get(field.name, field.default) for field in fields(VisionConfig)}
    for name in ("image_size", "patch_size"):
        values[name] = _square(values[name], f"{where}.{name}")
    for name, supported in _SUPPORTED.items():
        one_of(values[name], supported, f"{where}.{name}")
    one_of(stated.get("use_absolute_position_embeddings", True), (True,), f"{where}.use_absolute_position_embeddings")
    vision = VisionConfig(**values | {"final_norm": not stated.get("use_mean_pooling", True)})
    check_sizes(values, ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), f"{where}.")
    for name in ("layer_norm_eps", "qk_norm_eps", "downsample_ratio"):
        check_number(values[name], f"{where}.{name}")
    depth, layer, ratio = vision.num_hidden_layers, vision.feature_layer, vision.downsample_ratio
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise CheckpointError(f"{where}: the selected vision layer must be one of the {depth + 1} states, not {layer}")
    if vision.hidden_size % vision.num_attention_heads:
        raise CheckpointError(
            f"{where}: {vision.num_attention_heads} heads do not divide {vision.hidden_size} channels"
        )
    if vision.image_size % vision.patch_size:
        raise CheckpointError(f"{where}: patch_size {vision.patch_size} does not divide image_size {vision.image_size}")
    side = vision.patches_per_side
    if not 0 < ratio <= 1 or (1 / ratio) % 1 or side % int(1 / ratio):
        raise CheckpointError(f"{where}: downsample_ratio {ratio} does not divide a side of {side}")
    return vision


def _square(value: Any, where: str) -> int:
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{where} must be one positive side length of a square, not {value!r}")
    return sides.pop()
