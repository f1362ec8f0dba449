"""The original layout, OpenGVLab's ``InternVLChatModel``, whose code travels with it and is never run.

Weight names: ``modeling_internvl_chat.py`` and ``modeling_intern_vit.py``; defaults: ``configuration_intern_vit.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig, NameTable
from tessera.checkpoint.files import section
from tessera.checkpoint.text import assemble
from tessera.checkpoint.weights import WB, WBS
from tessera.models.internvl.config import TileRule, read_vision

_TOWER, _PROJECTOR = r"(?:model\.)?vision_model\.", r"(?:model\.)?mlp1\."
_LAYER = _TOWER + r"encoder\.layers\.(\d+)\."
# Our names are the parameters of the tower, InternViT, before packing.
VISION_NAMES: NameTable = (
    (rf"{_TOWER}embeddings\.class_embedding", "class_embedding"),
    (rf"{_TOWER}embeddings\.position_embedding", "position_embedding"),
    (rf"{_TOWER}embeddings\.patch_embedding\.{WB}", r"patch_embedding.\1"),
    (rf"{_LAYER}attn\.qkv\.{WBS}", r"layers.\1.attention.qkv.\2"),
    (rf"{_LAYER}attn\.([qk])_norm\.weight", r"layers.\1.attention.\2_norm.weight"),
    (rf"{_LAYER}attn\.proj\.{WBS}", r"layers.\1.attention.output.\2"),
    (rf"{_LAYER}norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
    (rf"{_LAYER}ls([12])", r"layers.\1.scale\2"),
    (rf"{_LAYER}mlp\.fc([12])\.{WBS}", r"layers.\1.mlp.linear\2.\3"),
    (rf"{_PROJECTOR}0\.{WB}", r"projector.norm.\1"),
    (rf"{_PROJECTOR}1\.{WBS}", r"projector.linear1.\1"),
    (rf"{_PROJECTOR}3\.{WBS}", r"projector.linear2.\1"),
)
_VISION_DEFAULTS = dict(
    hidden_size=3200,
    intermediate_size=12800,
    num_hidden_layers=48,
    num_attention_heads=25,
    norm_type="rms_norm",
)


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError.

    How grey levels are normalised stands in the layout's code alone; its preprocessor_config.json is never used.
    """
    where = f"{folder}/config.json"
    stated = section(raw, "vision_config", where)
    renamed = {
        "image_size": raw.get("force_image_size") or stated.get("image_size", 224),
        "attention_bias": stated.get("qkv_bias", False),
        "use_qk_norm": stated.get("qk_normalization", True),
        "qk_norm_eps": stated.get("layer_norm_eps", 1e-6),
        "feature_layer": raw.get("select_layer", -1),
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "ps_version": raw.get("ps_version", "v1"),
    }
    most = raw.get("max_dynamic_patch", 12) if raw.get("dynamic_image_size", True) else 1
    least, thumbnail = min(raw.get("min_dynamic_patch", 1), most), raw.get("use_thumbnail", True)
    return assemble(
        folder,
        raw,
        _named_as_transformers_does(section(raw, "llm_config", where)),
        vision_names=VISION_NAMES,
        layout="internvl_chat",
        vision=read_vision(_VISION_DEFAULTS | stated | renamed, f"{where}: vision_config"),
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
