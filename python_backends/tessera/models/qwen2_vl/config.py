"""transformers' layout of Qwen2-VL, ``Qwen2VLForConditionalGeneration``.

The text model's settings lie in ``text_config`` (newer savers) or in config.json itself (published files). Defaults:
``configuration_qwen2_vl.py`` and ``image_processing_qwen2_vl.py``; weight names: ``modeling_qwen2_vl.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from tessera.checkpoint.config import CheckpointConfig, NameTable
from tessera.checkpoint.files import PILLOW_BICUBIC, one_of, read_fields, read_processor, section
from tessera.checkpoint.normalization import CLIP_MEAN, CLIP_STD, Channels, pixel_statistics
from tessera.checkpoint.weights import WB, WBS
from tessera.errors import CheckpointError
from tessera.models.text.config import assemble

Kind = TypeVar("Kind")
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")

_TOWER, _LAYER = r"(?:model\.)?visual\.", r"(?:model\.)?visual\.blocks\.(\d+)\."
VISION_NAMES: NameTable = (
    (rf"{_TOWER}patch_embed\.proj\.weight", "patch_embedding.weight"),
    (rf"{_LAYER}norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
    (rf"{_LAYER}attn\.qkv\.{WBS}", r"layers.\1.attention.qkv.\2"),
    (rf"{_LAYER}attn\.proj\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_LAYER}mlp\.fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_TOWER}merger\.ln_q\.{WB}", r"projector.norm.\1"),
    (rf"{_TOWER}merger\.mlp\.0\.{WBS}", r"projector.linear1.\1"),
    (rf"{_TOWER}merger\.mlp\.2\.{WBS}", r"projector.linear2.\1"),
)
# The modules of transformers 5, whichever saver named the weights.
MODULE_NAMES: NameTable = (
    (r"(?:model\.)?(?:language_model\.)?lm_head", "lm_head"),
    (r"(?:model\.)?visual\.", "model.visual."),
    (r"(?:model\.)?(?:language_model\.)?(?:model\.)?", "model.language_model."),
)
# What Qwen2VLTextConfig has otherwise than Qwen2Config.
_TEXT_DEFAULTS = dict(
    vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6,
)  # fmt: skip
_SECTIONS = [16, 24, 24]
# What stands beside the text model's settings where these lie in config.json itself.
_BESIDE_TEXT = (
    *("text_config", "vision_config", "image_token_id", "video_token_id"),
    *("vision_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_SIZE_KEYS = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")


@dataclass(frozen=True)
class PatchConfig:
    """A tower of patches by vision_config's names: what Qwen2-VL's and its relatives' state alike.

    It sees (x / 255 - ``pixel_mean``) / ``pixel_std``, a channel each, in ``temporal_patch_size`` equal frames.
    """

    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    rope_theta: float = 10000.0
    pixel_mean: Channels = CLIP_MEAN
    pixel_std: Channels = CLIP_STD


@dataclass(frozen=True)
class RelativeConfig(PatchConfig):
    """A relative's tower: ``hidden_size`` is its width, ``intermediate_size`` that of a layer's MLP inside."""

    hidden_size: int = 1152
    intermediate_size: int = 4304

    @property
    def embed_dim(self) -> int:
        """As Qwen2-VL's calls it."""
        return self.hidden_size

    @property
    def inner_size(self) -> int:
        return self.intermediate_size


@dataclass(frozen=True)
class VisionConfig(PatchConfig):
    """Qwen2-VL's tower; ``embed_dim`` is its width, ``hidden_size`` that of the rows."""

    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: int = 4
    hidden_act: Literal["quick_gelu", "gelu", "gelu_pytorch_tanh", "silu"] = "quick_gelu"
    hidden_size: int = 3584

    @property
    def inner_size(self) -> int:
        """How wide a layer's MLP is inside."""
        return self.embed_dim * self.mlp_ratio


@dataclass(frozen=True)
class PixelRange:
    """How many pixels a picture has once it is resized, as far as whole groups of patches allow; whether ``equal``
    groups are pruned then, or all kept."""

    min_pixels: int
    max_pixels: int
    prune: Literal["never", "equal"] = "never"


def read(
    folder: Path,
    raw: dict[str, Any],
    kind: type[Any] = VisionConfig,
    rows: str = "hidden_size",
    names: NameTable = VISION_NAMES,
    layout: str = "qwen2_vl",
) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError.

    A relative has another ``kind`` of tower, whose ``rows`` have the width so called, other ``names`` of its weights
    and another ``layout``.
    """
    where, processor = f"{folder}/config.json", read_processor(folder)
    text = section(raw, "text_config", where) if raw.get("text_config") else raw
    text = {**_TEXT_DEFAULTS, **{name: value for name, value in text.items() if name not in _BESIDE_TEXT}}
    vision = read_vision(kind, section(raw, "vision_config", where), processor, f"{where}: vision_config")
    config = assemble(
        folder,
        raw,
        # Only what the body is counts: architectures name the whole model here.
        text | {"model_type": "qwen2", "architectures": None},
        tie=raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False),
        mrope_section=_SECTIONS,
        vision_names=names,
        module_names=MODULE_NAMES,
        layout=layout,
        vision=vision,
        pictures=read_pixel_range(processor),
        image_token_id=raw.get("image_token_id", 151655),
    )
    one_of(getattr(vision, rows), (config.text.hidden_size,), f"{where}: vision_config.{rows}")
    return config


def read_vision(
    kind: type[Kind],
    stated: Mapping[str, Any],
    processor: Mapping[str, Any],
    where: str,
    processors: Sequence[str] = PROCESSORS,
    **own: Any,
) -> Kind:
    """The tower, as the dataclass ``kind``, for the patches of an image ``processor``, one of ``processors``. ``own``:
    fields that the family reads itself.

    Raises CheckpointError, also where the two do not fit; of the tower it begins with ``where``.
    """
    mean, std = pixel_statistics({"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **processor})
    for name in ("in_channels", "in_chans"):
        one_of(stated.get(name, 3), (3,), f"{where}.{name}")
    rope = stated.get("rope_parameters") or {}
    for name in rope:
        one_of(name, ("rope_type", "rope_theta"), f"{where}.rope_parameters: key")
    one_of(rope.get("rope_type", "axial"), ("axial",), f"{where}.rope_parameters: rope_type")
    vision: Any = read_fields(
        kind,
        stated,
        f"{where}.",
        ("in_channels", "in_chans", "rope_parameters", "spatial_patch_size", *own),
        rope_theta=rope.get("rope_theta", PatchConfig.rope_theta),
        pixel_mean=mean,
        pixel_std=std,
        **own,
    )
    one_of(stated.get("spatial_patch_size") or vision.patch_size, (vision.patch_size,), f"{where}.spatial_patch_size")
    if vision.embed_dim % (4 * vision.num_heads):
        raise CheckpointError(
            f"{where}: {vision.embed_dim} channels over {vision.num_heads} heads: a head must have a multiple of 4, "
            "whose pairs turn with two axes"
        )
    _check_processor(processor, vision, processors)
    return vision


def _check_processor(processor: Mapping[str, Any], vision: PatchConfig, names: Sequence[str]) -> None:
    """Raises CheckpointError unless the image processor is one of ``names`` and makes the patches that the tower takes.

    What it does not state is its own class's, and not the tower's.
    """
    one_of(processor.get("image_processor_type", names[0]), names, "image_processor_type")
    one_of(processor.get("resample", PILLOW_BICUBIC), (PILLOW_BICUBIC,), "the image processor's resample")
    sizes = {
        "patch_size": (14, vision.patch_size),
        "merge_size": (2, vision.spatial_merge_size),
        "temporal_patch_size": (type(vision).temporal_patch_size, vision.temporal_patch_size),
    }
    for name, (default, size) in sizes.items():
        one_of(processor.get(name, default), (size,), f"with this vision_config, the image processor's {name}")


def read_pixel_range(processor: Mapping[str, Any], default: Mapping[str, int] = MappingProxyType(_SIZE)) -> PixelRange:
    """``min_pixels`` and ``max_pixels``, which go before ``size``; older savers use these names inside of it too.

    ``default``: the ``size`` of a processor that states none.
    """
    size = section({"size": dict(default), **processor}, "size", "the image processor")
    for name in size:
        one_of(name, _SIZE_KEYS, "the image processor's size: key")
    least = processor.get("min_pixels", size.get("shortest_edge", size.get("min_pixels")))
    most = processor.get("max_pixels", size.get("longest_edge", size.get("max_pixels")))
    if type(least) is not int or type(most) is not int or not 1 <= least <= most:
        raise CheckpointError(
            f"the image processor's min_pixels {least!r:.50} and max_pixels {most!r:.50} must be whole numbers of at "
            "least 1, the first not above the second"
        )
    return PixelRange(least, most)
