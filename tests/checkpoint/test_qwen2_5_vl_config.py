"""config.json of Qwen2.5-VL, as published files and newer savers have it: what is read, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from models.checkpoint_folders import write
from tiny_qwen2_vl import QWEN2_5_VL, edit, write_folder

from tessera.checkpoint.weights import split_names
from tessera.errors import CheckpointError
from tessera.models.qwen2_5_vl.config import VisionConfig
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import read_config

TEXT = dict(
    hidden_act="silu", hidden_size=3584, intermediate_size=18944, max_position_embeddings=128000, max_window_layers=28,
    num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0,
    use_cache=True, use_sliding_window=False, vocab_size=152064,
)  # fmt: skip
VISION = dict(
    depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3,
    out_hidden_size=3584, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, temporal_patch_size=2,
)  # fmt: skip
IDS = dict(vision_start_token_id=151652, vision_end_token_id=151653, vision_token_id=151654, video_token_id=151656)
ROOT = dict(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", image_token_id=151655)
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
#: the 7B's, as its authors' file and as transformers 4.53 saved it, which keeps the flat settings
SAVED = {
    "flat": ROOT | IDS | TEXT | {"sliding_window": 32768, "rope_scaling": MROPE, "vision_config": VISION},
    "by transformers 4.53": {
        **(ROOT | IDS | TEXT),
        "rope_scaling": MROPE | {"type": "default", "rope_type": "default"},
        "text_config": {
            **(TEXT | IDS),
            "image_token_id": None,
            "video_token_id": None,
            "layer_types": ["full_attention"] * 28,
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": MROPE | {"type": "default", "rope_type": "default"},
            "sliding_window": None,
        },
        "vision_config": VISION | {"in_channels": 3, "model_type": "qwen2_5_vl", "torch_dtype": "float32"},
    },
}


@pytest.mark.parametrize("saved", SAVED)
def test_the_settings_of_the_7b(tmp_path: Path, saved: str) -> None:
    write(tmp_path, "config.json", SAVED[saved])
    write(
        tmp_path,
        "preprocessor_config.json",
        dict(image_processor_type="Qwen2VLImageProcessor", min_pixels=3136, max_pixels=12845056, merge_size=2),
    )
    config = read_config(tmp_path)
    vision, text = config.vision, config.text
    assert (vision.depth, vision.embed_dim, vision.intermediate_size, vision.window) == (32, 1280, 3420, 4)
    assert list(vision.fullatt_block_indexes) == [7, 15, 23, 31]
    assert (text.architecture, text.hidden_size, text.head_dim, text.row_size) == ("Qwen2ForCausalLM", 3584, 128, 3584)
    assert (text.mrope_section, text.attention_bias) == ((16, 24, 24), True)
    assert config.pictures == PixelRange(3136, 12845056) and config.image_token_id == 151655


def test_what_a_saver_left_out_takes_the_class_default(tmp_path: Path) -> None:
    """Its tower is as wide as its rows, and so much wider than the published ones."""
    folder = write_folder(tmp_path, QWEN2_5_VL)
    gone = dict.fromkeys((*QWEN2_5_VL.vision, "in_chans", "spatial_patch_size", "out_hidden_size"))
    text = {"hidden_size": 3584, "num_attention_heads": 28, "rope_scaling": None}
    vision = read_config(edit(folder, vision_config=gone, text_config=text)).vision
    assert vision == VisionConfig()
    assert (vision.hidden_size, vision.intermediate_size, tuple(vision.fullatt_block_indexes)) == (
        3584,
        3420,
        (7, 15, 23, 31),
    )


def test_names_of_published_files_and_of_each_saver(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path, QWEN2_5_VL))
    for tower in ("visual", "model.visual"):
        stored = {
            f"{tower}.blocks.7.mlp.gate_proj.weight": "layers.7.mlp.gate_proj.weight",
            f"{tower}.blocks.7.mlp.up_proj.bias": "layers.7.mlp.up_proj.bias",
            f"{tower}.blocks.7.mlp.down_proj.weight_scale": "layers.7.mlp.linear2.weight_scale",
            f"{tower}.merger.ln_q.weight": "projector.norm.weight",
        }
        assert split_names(stored, config)["vision"] == stored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 32}, "vision_config setting 'embed_dim' is not supported"),
        ({"mlp_ratio": 4}, "vision_config setting 'mlp_ratio' is not supported"),
        ({"hidden_act": "gelu"}, "vision_config.hidden_act 'gelu' is not supported; supported are silu"),
        ({"out_hidden_size": 32}, "vision_config.out_hidden_size 32 is not supported; supported are 64"),
        ({"intermediate_size": 0}, "vision_config.intermediate_size must be a positive whole number"),
        ({"num_heads": 3}, "32 channels over 3 heads"),
        ({"window_size": 27}, "window_size 27 is less than a group of patches, 28"),
        ({"fullatt_block_indexes": 7}, "fullatt_block_indexes must be a list of whole numbers from 0, not 7"),
        ({"fullatt_block_indexes": [-1]}, r"fullatt_block_indexes must be .*, not \[-1\]"),
        ({"fullatt_block_indexes": [0, 1.0]}, r"fullatt_block_indexes must be .*, not \[0, 1.0\]"),
        ({"deepstack_visual_indexes": [0]}, "setting 'deepstack_visual_indexes' is not supported"),
    ],
)
def test_what_the_tower_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(edit(write_folder(tmp_path, QWEN2_5_VL), vision_config=changes))
