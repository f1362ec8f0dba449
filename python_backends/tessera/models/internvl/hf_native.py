"""transformers' layout, ``InternVLForConditionalGeneration``.

Weight names: ``modeling_internvl.py`` (module names) and ``conversion_mapping.py`` (the names it saves, without the
leading ``model.``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.checkpoint.config import CheckpointConfig, NameTable
from tessera.checkpoint.files import one_of, read_processor, section
from tessera.checkpoint.normalization import pixel_statistics
from tessera.checkpoint.text import assemble
from tessera.checkpoint.weights import WB, WBS
from tessera.models.internvl.config import TileRule, read_vision

PILLOW_BICUBIC = 3
PROCESSORS = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")

_TOWER, _PROJECTOR = r"(?:model\.)?vision_tower\.", r"(?:model\.)?multi_modal_projector\."
_LAYER = _TOWER + r"encoder\.layer\.(\d+)\."
# Our names are the parameters of the tower, InternViT, before packing.
VISION_NAMES: NameTable = (
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
MODULE_NAMES: NameTable = (
    (r"(?:model\.)?(?:language_model\.)?lm_head", "lm_head"),
    (r"(?:model\.)?language_model\.(?:model\.)?", "model.language_model."),
    (r"(?:model\.)?", "model."),
)


def read(folder: Path, raw: dict[str, Any]) -> CheckpointConfig:
    """The configuration of a folder whose config.json is ``raw``. Raises CheckpointError."""
    where, processor = f"{folder}/config.json", read_processor(folder)
    one_of(
        raw.get("vision_feature_select_strategy", "default"), ("default",), f"{where}: vision_feature_select_strategy"
    )
    mean, std = pixel_statistics(processor)
    outside = {
        "feature_layer": raw.get("vision_feature_layer", -1),
        "downsample_ratio": raw.get("downsample_ratio", 0.5),
        "projector_hidden_act": raw.get("projector_hidden_act", "gelu"),
        "pixel_mean": mean,
        "pixel_std": std,
    }
    vision = read_vision(section(raw, "vision_config", where) | outside, f"{where}: vision_config")
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
        vision_names=VISION_NAMES,
        module_names=MODULE_NAMES,
        layout="hf_native",
        vision=vision,
        pictures=TileRule(processor.get("min_patches", 1), processor.get("max_patches", 12), "auto", "columns"),
        image_token_id=raw.get("image_token_id", raw.get("image_token_index", 151667)),
    )
