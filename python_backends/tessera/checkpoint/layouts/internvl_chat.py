"""The original layout, OpenGVLab's ``InternVLChatModel``, whose code travels with it and is never run.

Weight names: ``modeling_internvl_chat.py`` and ``modeling_intern_vit.py``; defaults: ``configuration_intern_vit.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.layouts.internvl import VISION_DEFAULTS, TileRule, assemble, read_vision, section
from tessera.checkpoint.names import WB, NameTable

# Our names are the parameters of the tower, InternViT, before packing.
VISION_NAMES: NameTable = tuple(
    (rf"(?:model\.)?{pattern}", ours)
    for pattern, ours in (
        (r"vision_model\.embeddings\.class_embedding", "class_embedding"),
        (r"vision_model\.embeddings\.position_embedding", "position_embedding"),
        (rf"vision_model\.embeddings\.patch_embedding\.{WB}", r"patch_embedding.\1"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.attn\.qkv\.{WB}", r"layers.\1.attention.qkv.\2"),
        (
            r"vision_model\.encoder\.layers\.(\d+)\.attn\.([qk])_norm\.weight",
            r"layers.\1.attention.\2_norm.weight",
        ),
        (rf"vision_model\.encoder\.layers\.(\d+)\.attn\.proj\.{WB}", r"layers.\1.attention.output.\2"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.norm([12])\.{WB}", r"layers.\1.norm\2.\3"),
        (r"vision_model\.encoder\.layers\.(\d+)\.ls([12])", r"layers.\1.scale\2"),
        (rf"vision_model\.encoder\.layers\.(\d+)\.mlp\.fc([12])\.{WB}", r"layers.\1.mlp.linear\2.\3"),
        (rf"mlp1\.0\.{WB}", r"projector.norm.\1"),
        (rf"mlp1\.1\.{WB}", r"projector.linear1.\1"),
        (rf"mlp1\.3\.{WB}", r"projector.linear2.\1"),
    )
)

_DEFAULTS = dict(
    VISION_DEFAULTS,
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
    vision = section(raw, "vision_config", where)
    most = raw.get("max_dynamic_patch", 12) if raw.get("dynamic_image_size", True) else 1
    stated = raw.get("system_message")
    return assemble(
        folder,
        raw,
        text_section=section(raw, "llm_config", where),
        vision_names=VISION_NAMES,
        layout="internvl_chat",
        vision=read_vision(
            vision
            | {
                "image_size": raw.get("force_image_size") or vision.get("image_size", 224),
                "attention_bias": vision.get("qkv_bias", False),
                "use_qk_norm": vision.get("qk_normalization", True),
                "qk_norm_eps": vision.get("layer_norm_eps", 1e-6),
            },
            _DEFAULTS,
            where,
            feature_layer=raw.get("select_layer", -1),
            downsample_ratio=raw.get("downsample_ratio", 0.5),
            ps_version=raw.get("ps_version", "v1"),
        ),
        pictures=TileRule(
            min(raw.get("min_dynamic_patch", 1), most),
            most,
            "auto" if raw.get("use_thumbnail", True) else "never",
            "set",
        ),
        image_token_id=raw.get("img_context_token_id"),
        conversation=raw.get("template") or "",
        system_message=stated if isinstance(stated, str) else None,
    )
