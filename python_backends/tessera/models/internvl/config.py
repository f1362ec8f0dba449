"""Both layouts of InternVL: the tower (InternViT and its projector), how pictures become tiles, names of weights.

transformers' layout, ``InternVLForConditionalGeneration``: ``modeling_internvl.py`` (module names) and
``conversion_mapping.py`` (the names it saves, without the leading ``model.``).

The original layout, OpenGVLab's ``InternVLChatModel``, whose code travels with it and is never run:
``modeling_internvl_chat.py`` and ``modeling_intern_vit.py``; defaults: ``configuration_intern_vit.py``.

And Qianfan-OCR, transformers' ``qianfan_ocr``: the first layout's config.json, the second's names of weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tessera.checkpoint.config import CheckpointConfig, NameTable, architecture_of
from tessera.checkpoint.files import PILLOW_BICUBIC, one_of, read_fields, read_processor, section
from tessera.checkpoint.normalization import IMAGENET_MEAN, IMAGENET_STD, Channels, pixel_statistics
from tessera.checkpoint.weights import WB, WBS
from tessera.errors import CheckpointError
from tessera.models.text.config import assemble

PROCESSORS = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")
_TOWER, _PROJECTOR = r"(?:model\.)?vision_tower\.", r"(?:model\.)?multi_modal_projector\."
_LAYER = _TOWER + r"encoder\.layer\.(\d+)\."
# Our names are the parameters of the tower, InternViT, before packing.
_NATIVE_NAMES: NameTable = (
    (rf"{_TOWER}embeddings\.cls_token", "class_embedding"),
    (rf"{_TOWER}embeddings\.position_embeddings", "position_embedding"),
    (rf"{_TOWER}embeddings\.patch_embeddings\.projection\.{WB}", r"patch_embedding.\1"),
    (rf"{_LAYER}attention\.([qkv])_proj\.{WBS}", r"layers.\1.attention.\2_proj.\3"),
    (rf"{_LAYER}attention\.([qk])_norm\.weight", r"layers.\1.attention.\2_norm.weight"),
    (rf"{_LAYER}attention\.projection_layer\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_LAYER}layernorm_before\.{WB}", r"layers.\1.norm1.\2"),
    (rf"{_LAYER}layernorm_after\.{WB}", r"layers.\1.norm2.\2"),
    (rf"{_LAYER}lambda_([12])", r"layers.\1.scale\2"),
    (rf"{_LAYER}mlp\.fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_TOWER}layernorm\.{WB}", r"final_norm.\1"),
    (rf"{_PROJECTOR}layer_norm\.{WB}", r"projector.norm.\1"),
    (rf"{_PROJECTOR}linear_([12])\.{WBS}", r"projector.linear\1.\2"),
)
# transformers' classes nest the model and its language model otherwise than its files do.
_NATIVE_MODULES: NameTable = (
    (r"(?:model\.)?(?:language_model\.)?lm_head", "lm_head"),
    (r"(?:model\.)?language_model\.(?:model\.)?", "model.language_model."),
    (r"(?:model\.)?", "model."),
)
# Qianfan-OCR's tower and projector, which its class calls otherwise throughout: what names modules takes patterns too.
_QIANFAN_MODULES: NameTable = (
    (r"(?:model\.)?vision_model\..*", r"re:model\.vision_tower\..*"),
    (r"(?:model\.)?mlp1\..*", r"re:model\.multi_modal_projector\..*"),
    *_NATIVE_MODULES,
)
_MODEL, _MLP = r"(?:model\.)?vision_model\.", r"(?:model\.)?mlp1\."
_BLOCK = _MODEL + r"encoder\.layers\.(\d+)\."
_ORIGINAL_NAMES: NameTable = (
    (rf"{_MODEL}embeddings\.class_embedding", "class_embedding"),
    (rf"{_MODEL}embeddings\.position_embedding", "position_embedding"),
    (rf"{_MODEL}embeddings\.patch_embedding\.{WB}", r"patch_embedding.\1"),
    (rf"{_BLOCK}attn\.qkv\.{WBS}", r"layers.\1.attention.qkv.\2"),
    (rf"{_BLOCK}attn\.([qk])_norm\.weight", r"layers.\1.attention.\2_norm.weight"),
    (rf"{_BLOCK}attn\.proj\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_BLOCK}norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
    (rf"{_BLOCK}ls([12])", r"layers.\1.scale\2"),
    (rf"{_BLOCK}mlp\.fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_MLP}0\.{WB}", r"projector.norm.\1"),
    (rf"{_MLP}1\.{WBS}", r"projector.linear1.\1"),
    (rf"{_MLP}3\.{WBS}", r"projector.linear2.\1"),
)
_ORIGINAL_DEFAULTS = dict(
    hidden_size=3200, intermediate_size=12800, num_hidden_layers=48, num_attention_heads=25, norm_type="rms_norm",
    image_size=224, layer_norm_eps=1e-6, qkv_bias=False, qk_normalization=True,
)  # fmt: skip
# Of the code's experts, which published files state and switch off.
_EXPERTS = (
    *("capacity_factor", "eval_capacity_factor", "laux_allreduce", "moe_coeff_ratio", "moe_intermediate_size"),
    *("moe_output_scale", "noisy_gate_policy", "num_experts", "num_routed_experts", "num_shared_experts"),
    *("shared_expert_intermediate_size", "use_residual", "use_rts", "use_weighted_residual"),
)
# What the tower does and has no choice about.
_FIXED = {"use_absolute_position_embeddings": True, "use_moe": False}
Activation = Literal["gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "silu"]


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
    hidden_act: Activation = "gelu"
    norm_type: Literal["layer_norm", "rms_norm"] = "layer_norm"
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    num_channels: Literal[3] = 3
    final_norm: bool = False
    feature_layer: int = -1
    downsample_ratio: float = 0.5
    ps_version: Literal["v1", "v2"] = "v2"
    projector_hidden_act: Activation = "gelu"
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


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    original = architecture_of(raw) in ("InternVLChatModel", "internvl_chat")
    return (_read_original if original else _read_native)(folder, raw)


def read_qianfan(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """As ``read``, of Qianfan-OCR. Defaults: transformers ``configuration_qianfan_ocr.py``.

    config.json may also state what the original layout has; transformers passes over it and vLLM does not, so that what
    differs from what is done here is refused.
    """
    where = f"{folder}/config.json"
    stated = {
        "text_config": {"model_type": "qwen3"} | section(raw, "text_config", where),
        "vision_config": {"attention_bias": True} | section(raw, "vision_config", where),
    }
    native = {"tie_word_embeddings": False} | raw | stated
    config = _read_native(folder, native, _ORIGINAL_NAMES, _QIANFAN_MODULES, "qianfan_ocr")
    done = {
        "ps_version": config.vision.ps_version,
        "force_image_size": config.vision.image_size,
        "select_layer": config.vision.feature_layer,
        "min_dynamic_patch": config.pictures.min_tiles,
        "max_dynamic_patch": config.pictures.max_tiles,
        **dict.fromkeys(("dynamic_image_size", "use_thumbnail"), True),
    }
    for name, value in done.items():
        one_of(raw.get(name, value), (value,), f"{where}: beside the image processor's settings, {name}")
    return replace(config, raw=raw)


def _read_native(
    folder: Path,
    raw: dict[str, Any],
    vision_names: NameTable = _NATIVE_NAMES,
    module_names: NameTable = _NATIVE_MODULES,
    layout: str = "hf_native",
) -> CheckpointConfig:
    """transformers' layout."""
    where, processor = f"{folder}/config.json", read_processor(folder)
    one_of(
        raw.get("vision_feature_select_strategy", "default"), ("default",), f"{where}: vision_feature_select_strategy"
    )
    outside = {name: raw[name] for name in ("downsample_ratio", "projector_hidden_act") if name in raw}
    vision = _read_vision(
        section(raw, "vision_config", where) | outside,
        f"{where}: vision_config",
        raw.get("vision_feature_layer", -1),
        pixel_statistics(processor),
    )
    tile = {"height": vision.image_size, "width": vision.image_size}
    tokens = processor.get("image_seq_length", raw.get("image_seq_length", vision.tokens_per_tile))
    # crop_to_patches is not asked: transformers' InternVLProcessor cuts tiles whatever it says.
    one_of(processor.get("image_processor_type", PROCESSORS[0]), PROCESSORS, "image_processor_type")
    one_of(processor.get("size", tile), (tile,), "the image processor's size")
    one_of(processor.get("resample", PILLOW_BICUBIC), (PILLOW_BICUBIC,), "the image processor's resample")
    one_of(tokens, (vision.tokens_per_tile,), "with this vision_config, image_seq_length")
    return assemble(
        folder,
        raw,
        # Only the model_type counts: architectures may name the class without its head.
        {"model_type": "qwen2"} | section(raw, "text_config", where) | {"architectures": None},
        tie=raw.get("tie_word_embeddings"),
        vision_names=vision_names,
        module_names=module_names,
        layout=layout,
        vision=vision,
        pictures=TileRule(processor.get("min_patches", 1), processor.get("max_patches", 12), "auto", "columns"),
        image_token_id=raw.get("image_token_id", raw.get("image_token_index", 151667)),
    )


def _read_original(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The original layout.

    How grey levels are normalised stands in the layout's code alone; its preprocessor_config.json is never used.
    """
    where = f"{folder}/config.json"
    stated = _ORIGINAL_DEFAULTS | section(raw, "vision_config", where)
    tower = stated | {
        "image_size": raw.get("force_image_size") or stated["image_size"],
        "attention_bias": stated.pop("qkv_bias"),
        "use_qk_norm": stated.pop("qk_normalization"),
        "qk_norm_eps": stated["layer_norm_eps"],
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "ps_version": raw.get("ps_version", "v1"),
    }
    most = raw.get("max_dynamic_patch", 12) if raw.get("dynamic_image_size", True) else 1
    least, thumbnail = min(raw.get("min_dynamic_patch", 1), most), raw.get("use_thumbnail", True)
    return assemble(
        folder,
        raw,
        _named_as_transformers_does(section(raw, "llm_config", where)),
        vision_names=_ORIGINAL_NAMES,
        layout="internvl_chat",
        vision=_read_vision(tower, f"{where}: vision_config", raw.get("select_layer", -1)),
        pictures=TileRule(least, most, "auto" if thumbnail else "never", "set"),
        image_token_id=raw.get("img_context_token_id"),
        conversation=str(raw.get("template")),
        system_message=raw.get("system_message"),
    )


def _named_as_transformers_does(llm: dict[str, Any]) -> dict[str, Any]:
    """The language model's section; the Phi-3 code of published files calls longrope "su", and has its trained length
    beside the section alone, where transformers wants it inside for this name."""
    scaling = llm.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "su":
        return llm
    return llm | {"rope_scaling": scaling | {"type": "longrope"}}


def _read_vision(
    stated: Mapping[str, Any],
    where: str,
    layer: Any,
    statistics: tuple[Channels, Channels] = (IMAGENET_MEAN, IMAGENET_STD),
) -> VisionConfig:
    """The tower by the names of VisionConfig's fields; ``layer`` is its feature_layer, ``statistics`` the pixels' mean
    and std. Raises CheckpointError that begins with ``where``."""
    for name, value in _FIXED.items():
        one_of(stated.get(name, value), (value,), f"{where}.{name}")
    sides = {name: _square(stated[name], f"{where}.{name}") for name in ("image_size", "patch_size") if name in stated}
    vision = read_fields(
        VisionConfig,
        {**stated, **sides},
        f"{where}.",
        (*_FIXED, *_EXPERTS, "use_mean_pooling"),
        final_norm=not stated.get("use_mean_pooling", True),
        feature_layer=layer,
        pixel_mean=statistics[0],
        pixel_std=statistics[1],
    )
    depth, ratio = vision.num_hidden_layers, vision.downsample_ratio
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
