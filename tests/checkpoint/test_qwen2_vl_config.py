"""config.json and the processor's file of Qwen2-VL, as old and new savers write them."""

from pathlib import Path
from typing import Any

import pytest
from models.checkpoint_folders import write
from tiny_qwen2_vl import ROPE, edit, write_folder

from tessera.checkpoint.weights import split_names
from tessera.errors import CheckpointError
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import read_config


def test_what_a_saver_left_out_takes_the_class_default(tmp_path: Path) -> None:
    """As transformers' Qwen2VLConfig: a body of 72B, rope sections of 16, 24 and 24."""
    edit(
        write_folder(tmp_path), text_config=dict.fromkeys(("vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling"))
    )
    edit(tmp_path, text_config={"hidden_size": 512}, vision_config={"hidden_size": 512})
    text = read_config(tmp_path).text
    assert (text.vocab_size, text.rms_norm_eps, text.rope_theta) == (152064, 1e-5, 1e6)
    assert text.mrope_section == (16, 24, 24)


def test_either_place_ties_the_head(tmp_path: Path) -> None:
    """transformers 4 stated it in text_config alone."""
    assert not read_config(write_folder(tmp_path)).text.tie_word_embeddings
    assert read_config(edit(tmp_path, text_config={"tie_word_embeddings": True})).text.tie_word_embeddings
    assert read_config(edit(write_folder(tmp_path), tie_word_embeddings=True)).text.tie_word_embeddings


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({}, (3136, 1003520)),
        ({"min_pixels": 784, "max_pixels": 7840}, (784, 7840)),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}}, (784, 7840)),
        ({"size": {"min_pixels": 784, "max_pixels": 7840}}, (784, 7840)),
        ({"size": {"shortest_edge": 784, "longest_edge": 7840}, "max_pixels": 9000}, (784, 9000)),
        ({"max_pixels": 9000}, (3136, 9000)),
    ],
)
def test_pixels_are_stated_in_several_ways(
    tmp_path: Path, processor: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert read_config(write_folder(tmp_path, **processor)).pictures == PixelRange(*expected)


def test_a_patch_size_that_is_not_stated_is_the_class_s_and_not_the_tower_s(tmp_path: Path) -> None:
    folder = edit(write_folder(tmp_path), vision_config={"patch_size": 16, "spatial_patch_size": None})
    with pytest.raises(CheckpointError, match="the image processor's patch_size 14 is not supported; supported are 16"):
        read_config(folder)
    write(folder, "processor_config.json", {"patch_size": 16})
    assert read_config(folder).vision.patch_size == 16


def test_newer_savers_nest_the_image_processor(tmp_path: Path) -> None:
    size = {"shortest_edge": 784, "longest_edge": 7840}
    write(write_folder(tmp_path), "processor_config.json", {"image_processor": {"size": size}, "video_processor": {}})
    assert read_config(tmp_path).pictures == PixelRange(784, 7840)


@pytest.mark.parametrize("body", ["model", "model.language_model", "language_model.model"])
@pytest.mark.parametrize("tower", ["visual", "model.visual"])
def test_names_of_published_files_and_of_each_saver(tmp_path: Path, body: str, tower: str) -> None:
    config = read_config(write_folder(tmp_path))
    stored = {
        f"{body}.layers.3.self_attn.q_proj.bias": ("text", "model.layers.3.self_attn.q_proj.bias"),
        f"{body}.norm.weight": ("text", "model.norm.weight"),
        "lm_head.weight": ("text", "lm_head.weight"),
        f"{tower}.patch_embed.proj.weight": ("vision", "patch_embedding.weight"),
        f"{tower}.blocks.7.attn.qkv.bias": ("vision", "layers.7.attention.qkv.bias"),
        f"{tower}.merger.mlp.2.weight": ("vision", "projector.linear2.weight"),
    }
    split = split_names(stored, config)
    assert {name: (part, ours) for part in split for name, ours in split[part].items()} == stored
    with pytest.raises(CheckpointError, match="visual.blocks.0.attn.relative"):
        split_names([*stored, "visual.blocks.0.attn.relative"], config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"fullatt_block_indexes": [7]}}, "setting 'fullatt_block_indexes' is not supported"),
        ({"vision_config": {"in_chans": 1}}, "vision_config.in_chans 1"),
        ({"vision_config": {"hidden_act": "mish"}}, "vision_config.hidden_act 'mish'"),
        ({"vision_config": {"spatial_patch_size": 16}}, "vision_config.spatial_patch_size 16"),
        ({"vision_config": {"patch_size": [14, 14]}}, r"vision_config.patch_size must be .* not \[14, 14\]"),
        ({"vision_config": {"num_heads": 3}}, "32 channels over 3 heads"),
        ({"vision_config": {"hidden_size": 32}}, "vision_config.hidden_size 32"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters: rope_type 'yarn'"),
        ({"text_config": {"rope_scaling": ROPE | {"type": "yarn", "factor": 4.0}}}, "'yarn'"),
        ({"text_config": {"rope_scaling": ROPE | {"rope_type": "linear", "factor": 2}}}, "'linear'"),
        (
            {"vision_config": {"rope_parameters": {"rope_type": "axial", "factor": 2.0}}},
            "rope_parameters: key 'factor'",
        ),
        ({"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}}, "half the head size, 8"),
        ({"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 4.0]}}}, "mrope_section"),
        ({"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": 8}}}, "mrope_section 8"),
        ({"text_config": {"rope_scaling": ROPE | {"mrope_interleaved": True}}}, "'mrope_interleaved' is no setting"),
        ({"text_config": {"use_sliding_window": True}}, "use_sliding_window"),
        ({"vision_config": None}, "has no section 'vision_config'"),
    ],
)
def test_what_the_config_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(edit(write_folder(tmp_path), **changes))


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"image_processor_type": "Qwen3VLImageProcessor"}, "'Qwen3VLImageProcessor'"),
        ({"resample": 2}, "resample 2"),
        ({"merge_size": 4}, "merge_size 4"),
        ({"patch_size": 16}, "patch_size 16"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 1"),
        ({"do_pad": True}, "do_pad True"),
        ({"size": {"height": 448}}, "size: key 'height'"),
        ({"size": {"shortest_edge": 784}}, "max_pixels None"),
        ({"size": 448}, "'size'"),
        ({"min_pixels": 784.5}, "min_pixels 784.5"),
        ({"min_pixels": 7840, "max_pixels": 784}, "min_pixels 7840 and max_pixels 784"),
    ],
)
def test_what_the_processor_may_not_ask_for(tmp_path: Path, processor: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write_folder(tmp_path, **processor))
