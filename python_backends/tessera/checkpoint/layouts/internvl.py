"""What both layouts of InternVL describe: the tower (InternViT and its projector) and how pictures become tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_json, read_processor
from tessera.checkpoint.names import TEXT_NAMES, NameTable
from tessera.checkpoint.normalization import IMAGENET_MEAN, IMAGENET_STD, Channels
from tessera.checkpoint.text import read_text
from tessera.errors import CheckpointError

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "silu")


@dataclass(frozen=True)
class VisionConfig:
    """InternViT, pixel shuffle and projector. Sizes in pixels; ``image_size`` is the side of the square tiles.

    ``feature_layer`` counts hidden states as the reference does: -1 is the output of the last layer. ``final_norm``
    says that a LayerNorm follows that one (transformers' ``use_mean_pooling: false``). The tower sees
    (x / 255 - ``pixel_mean``) / ``pixel_std``, a channel each.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    hidden_act: str
    norm_type: str
    layer_norm_eps: float
    attention_bias: bool
    use_qk_norm: bool
    num_channels: int
    qk_norm_eps: float
    final_norm: bool
    feature_layer: int
    downsample_ratio: float
    ps_version: str
    projector_hidden_act: str
    pixel_mean: Channels
    pixel_std: Channels

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

    def __post_init__(self) -> None:
        if not all(type(count) is int and count > 0 for count in (self.min_tiles, self.max_tiles)):
            raise CheckpointError(f"the checkpoint states {self._bounds}; whole numbers of at least 1 are needed")
        if self.min_tiles > self.max_tiles:
            raise CheckpointError(f"the checkpoint states {self._bounds}, more at least than at most")

    @property
    def _bounds(self) -> str:
        return f"min_patches {self.min_tiles!r:.20} and max_patches {self.max_tiles!r:.20}"


# transformers ``configuration_internvl.py``
VISION_DEFAULTS = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=448,
    patch_size=14,
    hidden_act="gelu",
    norm_type="layer_norm",
    layer_norm_eps=1e-6,
    attention_bias=False,
    use_qk_norm=False,
    qk_norm_eps=1e-6,
    num_channels=3,
)


def read_vision(
    section: Mapping[str, Any],
    defaults: Mapping[str, Any],
    where: str,
    *,
    feature_layer: Any,
    downsample_ratio: Any,
    ps_version: Any,
    projector_hidden_act: Any = "gelu",
    statistics: tuple[Channels, Channels] = (IMAGENET_MEAN, IMAGENET_STD),
) -> VisionConfig:
    """``section`` of config.json, with the names of ``defaults``, and what stands outside of it, checked.

    Raises CheckpointError that begins with ``where``.
    """
    values = {name: section.get(name, default) for name, default in defaults.items()}
    for name in ("image_size", "patch_size"):
        values[name] = _square(values[name], f"{where}: vision_config.{name}")
    one_of(values["norm_type"], ("layer_norm", "rms_norm"), f"{where}: vision_config.norm_type")
    one_of(values["hidden_act"], ACTIVATIONS, f"{where}: vision_config.hidden_act")
    one_of(values["num_channels"], (3,), f"{where}: vision_config.num_channels")
    one_of(section.get("use_absolute_position_embeddings", True), (True,), f"{where}: use_absolute_position_embeddings")
    one_of(projector_hidden_act, ACTIVATIONS, f"{where}: projector_hidden_act")
    one_of(ps_version, ("v1", "v2"), f"{where}: ps_version")
    depth, heads = values["num_hidden_layers"], values["num_attention_heads"]
    if not isinstance(feature_layer, int) or not -depth - 1 <= feature_layer <= depth:
        raise CheckpointError(
            f"{where}: the selected vision layer must be one of the {depth + 1} states, not {feature_layer!r}"
        )
    if values["hidden_size"] % heads:
        raise CheckpointError(f"{where}: vision_config: {heads} heads do not divide {values['hidden_size']} channels")
    side, rest = divmod(values["image_size"], values["patch_size"])
    if rest:
        raise CheckpointError(
            f"{where}: vision_config: patch_size {values['patch_size']} does not divide image_size "
            f"{values['image_size']}"
        )
    ratio = float(downsample_ratio)
    if not 0 < ratio <= 1 or (1 / ratio) % 1 or side % int(1 / ratio):
        raise CheckpointError(f"{where}: downsample_ratio {ratio} does not divide a side of {side}")
    return VisionConfig(
        **values,
        final_norm=not section.get("use_mean_pooling", True),
        feature_layer=feature_layer,
        downsample_ratio=ratio,
        ps_version=ps_version,
        projector_hidden_act=projector_hidden_act,
        pixel_mean=statistics[0],
        pixel_std=statistics[1],
    )


def assemble(
    folder: Path,
    raw: dict[str, Any],
    text_section: Mapping[str, Any],
    vision_names: NameTable,
    tie: bool | None = None,
    **fields: Any,
) -> CheckpointConfig:
    """What is read alike in both layouts; ``fields`` are the others of CheckpointConfig."""
    text = read_text(folder, text_section, tie)
    eos = read_json(folder, "generation_config.json").get("eos_token_id", text_section.get("eos_token_id"))
    return CheckpointConfig(
        folder=folder,
        model_type=raw.get("model_type", fields["layout"]),
        text=text,
        weight_names={"vision": vision_names, "text": TEXT_NAMES[text.architecture]},
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        raw=raw,
        **({"processor": read_processor(folder)} | fields),
    )


def section(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object inside config.json; raises CheckpointError where there is none."""
    found = raw.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} has no section {name!r}")
    return found


def one_of(value: Any, allowed: tuple[Any, ...], where: str) -> None:
    """Raises CheckpointError for any other value."""
    if value not in allowed:
        raise CheckpointError(f"{where} {value!r:.80} is not supported; supported are {', '.join(map(str, allowed))}")


def _square(value: Any, where: str) -> int:
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{where} must be one positive side length of a square, not {value!r}")
    return sides.pop()
