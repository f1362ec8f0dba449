"""transformers' layout, ``InternVLForConditionalGeneration``.

Weight names: ``modeling_internvl.py`` (module names) and ``conversion_mapping.py`` (the names it saves, without the
leading ``model.``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig
from tessera.checkpoint.files import read_processor
from tessera.checkpoint.layouts.internvl import VISION_DEFAULTS, TileRule, assemble, one_of, read_vision, section
from tessera.checkpoint.names import WB, NameTable
from tessera.checkpoint.normalization import pixel_statistics

PILLOW_BICUBIC = 3
PROCESSORS = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")

# Our names are the parameters of the tower, InternViT, before packing.
VISION_NAMES: NameTable = tuple(
    (rf"(?:model\.)?{pattern}", ours)
    for pattern, ours in (
        (r"vision_tower\.embeddings\.cls_token", "class_embedding"),
        (r"vision_tower\.embeddings\.position_embeddings", "position_embedding"),
        (rf"vision_tower\.embeddings\.patch_embeddings\.projection\.{WB}", r"patch_embedding.\1"),
        (
            rf"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qkv])_proj\.{WB}",
            r"layers.\1.attention.\2_proj.\3",
        ),
        (
            r"vision_tower\.encoder\.layer\.(\d+)\.attention\.([qk])_norm\.weight",
            r"layers.\1.attention.\2_norm.weight",
        ),
        (
            rf"vision_tower\.encoder\.layer\.(\d+)\.attention\.projection_layer\.{WB}",
            r"layers.\1.attention.output.\2",
        ),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.layernorm_before\.{WB}", r"layers.\1.norm1.\2"),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.layernorm_after\.{WB}", r"layers.\1.norm2.\2"),
        (r"vision_tower\.encoder\.layer\.(\d+)\.lambda_([12])", r"layers.\1.scale\2"),
        (rf"vision_tower\.encoder\.layer\.(\d+)\.mlp\.fc([12])\.{WB}", r"layers.\1.mlp.linear\2.\3"),
        (rf"vision_tower\.layernorm\.{WB}", r"final_norm.\1"),
        (rf"multi_modal_projector\.layer_norm\.{WB}", r"projector.norm.\1"),
        (rf"multi_modal_projector\.linear_([12])\.{WB}", r"projector.linear\1.\2"),
    )
)


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    where = f"{folder}/config.json"
    processor = read_processor(folder)
    one_of(
        raw.get("vision_feature_select_strategy", "default"), ("default",), f"{where}: vision_feature_select_strategy"
    )
    vision = read_vision(
        section(raw, "vision_config", where),
        VISION_DEFAULTS,
        where,
        feature_layer=raw.get("vision_feature_layer", -1),
        downsample_ratio=raw.get("downsample_ratio", 0.5),
        ps_version="v2",
        projector_hidden_act=raw.get("projector_hidden_act", "gelu"),
        statistics=pixel_statistics(processor),
    )
    tile = {"height": vision.image_size, "width": vision.image_size}
    tokens = processor.get("image_seq_length", raw.get("image_seq_length", vision.tokens_per_tile))
    # crop_to_patches is not asked: transformers' InternVLProcessor cuts tiles whatever it says.
    one_of(processor.get("image_processor_type", PROCESSORS[0]), PROCESSORS, "image_processor_type")
    one_of(processor.get("size", tile), (tile,), "the image processor's size")
    one_of(processor.get("resample", PILLOW_BICUBIC), (PILLOW_BICUBIC,), "the image processor's resample")
    one_of(tokens, (vision.tokens_per_tile,), "with this vision_config, image_seq_length")
    text_section = section(raw, "text_config", where)
    return assemble(
        folder,
        raw,
        # Only the model_type counts: architectures may name the class without its head.
        text_section={"model_type": "qwen2"} | text_section | {"architectures": None},
        tie=raw.get("tie_word_embeddings"),
        vision_names=VISION_NAMES,
        layout="hf_native",
        vision=vision,
        pictures=TileRule(processor.get("min_patches", 1), processor.get("max_patches", 12), "auto", "columns"),
        image_token_id=raw.get("image_token_id", raw.get("image_token_index", 151667)),
        processor=processor,
    )
