"""config.json and the processor's file of Qwen3-VL: defaults, published sizes, names of weights, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoint_folders import write
from published_sizes import BODIES
from safetensors.torch import load_file, save_file
from tiny_qwen2_vl import edit
from tiny_qwen3_vl import EXPERTS, HALVES, ROPE, TEXT, write_folder, write_model
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLMoeConfig

from tessera.checkpoint.normalization import CLIP_MEAN
from tessera.checkpoint.weights import fill, split_names
from tessera.errors import CheckpointError
from tessera.linear.quantization import scheme_selector
from tessera.linear.scheme import Linear
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.registry import family_for, model_class, read_config
from tessera.models.tower import unfilled_tower

CPU = torch.device("cpu")
MOE = "Qwen3VLMoeForConditionalGeneration"
PROCESSOR = {"patch_size": 16, "image_mean": HALVES, "image_std": HALVES}
LARGE = dict(hidden_size=1152, intermediate_size=4304, depth=27, deepstack_visual_indexes=[8, 16, 24])
SMALL = dict(hidden_size=1024, intermediate_size=4096, depth=24, deepstack_visual_indexes=[5, 11, 17])
#: body, tower, whether the head is tied, and parameters in millions as they are known
PUBLISHED = {
    "2B": ("Qwen3-1.7B", SMALL, True, 2128),
    "4B": ("Qwen3-4B", SMALL, True, 4438),
    "8B": ("Qwen3-8B", LARGE, False, 8767),
    "32B": ("Qwen3-32B", LARGE, False, 33357),
    "30B-A3B": ("Qwen3-30B-A3B", LARGE, False, 31071),
    "235B-A22B": ("Qwen3-235B-A22B", LARGE, False, 235670),
}


def published(folder: Path, name: str) -> Path:
    """A size's folder without weights."""
    body, tower, tied, _ = PUBLISHED[name]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text = BODIES[body].config() | {"max_position_embeddings": 262144, "rope_theta": 5e6, "rope_scaling": rope}
    for name in ("architectures", "use_sliding_window"):
        del text[name]
    kind = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    config = {
        "architectures": [MOE if "num_experts" in text else "Qwen3VLForConditionalGeneration"],
        "model_type": kind,
        "text_config": text | {"model_type": f"{kind}_text"},
        "vision_config": {**tower, "out_hidden_size": text["hidden_size"], "model_type": "qwen3_vl"},
        "tie_word_embeddings": tied,
    }
    write(folder, "config.json", config)
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    write(folder, "preprocessor_config.json", PROCESSOR | {"size": size})
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_a_tower_and_a_body(tmp_path: Path, name: str) -> None:
    """Of as many parameters as transformers' class has, which are those of the name."""
    config = read_config(published(tmp_path, name))
    text = config.text
    assert (text.mrope_section, text.mrope_interleaved, text.row_depth) == ((24, 20, 20), True, 4)
    assert config.pictures == PixelRange(65536, 16777216) and config.image_token_id == 151655
    assert family_for(config).plan(1024, 1024, config.pictures).tokens == 1024
    tower = unfilled_tower(config)
    assert tower.row_shape == (1, 4 * text.hidden_size)
    heads = tower.attention.heads * (tower.attention.head_size - tower.attention.stored_size)
    filled = len(tower.layers) * heads * (4 * config.vision.hidden_size + 3)
    second_frame = tower.patch_embedding.weight.numel()
    body = model_class(text.architecture)(text, scheme_selector(None), torch.bfloat16, torch.device("meta"))
    head = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    stored = sum(each.numel() for each in tower.parameters()) - filled + second_frame
    linears = [module for module in body.layers.modules() if isinstance(module, Linear)]
    products = sum(linear.out_features * linear.in_features for linear in linears)
    stored += sum(buffer.numel() for buffer in body.buffers()) + products + head
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    assert stored == sum(each.numel() for each in theirs.parameters())
    assert round(stored / 1e6) == PUBLISHED[name][-1]


def test_what_a_saver_left_out_takes_the_class_default(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {}, "vision_config": {}}
    write(tmp_path, "config.json", config | {"vision_config": {"out_hidden_size": 4096}})
    write(tmp_path, "preprocessor_config.json", {"patch_size": 16})
    found, theirs = read_config(tmp_path), Qwen3VLConfig()
    for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert getattr(found.text, name) == getattr(theirs.text_config, name)
    assert found.text.max_position_embeddings == theirs.text_config.max_position_embeddings
    assert found.text.rope_theta == theirs.text_config.rope_parameters["rope_theta"]
    assert found.text.mrope_section == (24, 20, 20) and not found.text.attention_bias
    for name in ("depth", "hidden_size", "hidden_act", "intermediate_size", "num_heads", "num_position_embeddings"):
        assert getattr(found.vision, name) == getattr(theirs.vision_config, name)
    assert found.vision.deepstack_visual_indexes == tuple(theirs.vision_config.deepstack_visual_indexes)
    assert found.vision.rope_theta == theirs.vision_config.rope_parameters["rope_theta"]
    assert found.vision.pixel_mean == tuple(
        value for value in CLIP_MEAN
    )  # the processor's class default, as Qwen2-VL's
    assert found.pictures == PixelRange(56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize("tower", ["visual", "model.visual"])
def test_names_of_weights(tmp_path: Path, tower: str) -> None:
    config = read_config(write_folder(tmp_path))
    stored = {
        "model.language_model.layers.3.self_attn.q_norm.weight": ("text", "model.layers.3.self_attn.q_norm.weight"),
        "lm_head.weight": ("text", "lm_head.weight"),
        f"{tower}.patch_embed.proj.bias": ("vision", "patch_embedding.bias"),
        f"{tower}.pos_embed.weight": ("vision", "position_embedding"),
        f"{tower}.blocks.7.mlp.linear_fc2.weight_scale": ("vision", "layers.7.mlp.linear2.weight_scale"),
        f"{tower}.merger.norm.bias": ("vision", "projector.norm.bias"),
        f"{tower}.deepstack_merger_list.1.norm.weight": ("vision", "projector.deep.1.norm.weight"),
        f"{tower}.deepstack_merger_list.1.linear_fc1.bias": ("vision", "projector.deep.1.linear1.bias"),
    }
    split = split_names(stored, config)
    assert {name: (part, ours) for part in split for name, ours in split[part].items()} == stored
    with pytest.raises(CheckpointError, match="merger.ln_q"):
        split_names([*stored, f"{tower}.merger.ln_q.weight"], config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"window_size": 112}}, "setting 'window_size' is not supported"),
        ({"vision_config": {"embed_dim": 48}}, "setting 'embed_dim' is not supported"),
        ({"vision_config": {"num_attention_heads": 2}}, "setting 'num_attention_heads' is not supported"),
        ({"vision_config": {"hidden_act": "relu"}}, "vision_config.hidden_act 'relu'"),
        ({"vision_config": {"patch_size": [16, 16]}}, r"vision_config.patch_size must be .* not \[16, 16\]"),
        ({"vision_config": {"num_heads": 5}}, "48 channels over 5 heads"),
        ({"vision_config": {"num_position_embeddings": 35}}, "num_position_embeddings 35 is no square"),
        ({"vision_config": {"out_hidden_size": 32}}, "vision_config.out_hidden_size 32"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_parameters: rope_type 'yarn'"),
        ({"vision_config": {"deepstack_visual_indexes": [2, 0]}}, r"\[2, 0\] must be numbers .* in ascending order"),
        ({"vision_config": {"deepstack_visual_indexes": [0, 0]}}, r"\[0, 0\] must be numbers"),
        ({"vision_config": {"deepstack_visual_indexes": [-1]}}, r"\[-1\] must be numbers"),
        ({"vision_config": {"deepstack_visual_indexes": 2}}, "deepstack_visual_indexes 2 must be numbers"),
        ({"vision_config": {"deepstack_visual_indexes": [0, 4]}}, r"\[0, 4\]: there are 4 layers, from 0"),
        (
            {"text_config": {"num_hidden_layers": 2}},
            r"\[0, 2\]: the text model must have more layers than these, not 2",
        ),
        ({"text_config": {"model_type": "qwen3_vl_moe_text"}}, "text model 'qwen3_vl_moe_text' is not supported"),
        ({"text_config": {"model_type": "qwen3"}}, "text model 'qwen3' is not supported"),
        ({"text_config": {"num_experts": 8}}, "setting 'num_experts' is not supported"),
        ({"text_config": {"rope_scaling": ROPE | {"rope_type": "yarn", "factor": 4.0}}}, "'yarn'"),
        ({"text_config": {"rope_scaling": ROPE | {"mrope_interleaved": False}}}, "mrope_interleaved False"),
        ({"text_config": {"rope_scaling": ROPE | {"mrope_section": [5, 4, 2]}}}, "half the head size, 12"),
        ({"text_config": {"rope_scaling": None}}, r"mrope_section \[24, 20, 20\] .* half the head size, 12"),
        ({"text_config": None}, "has no section 'text_config'"),
        ({"vision_config": None}, "has no section 'vision_config'"),
        ({"architectures": [MOE]}, "text model 'qwen3_vl_text' is not supported"),
        ({"architectures": None, "model_type": "qwen3_vl_moe"}, "text model 'qwen3_vl_text' is not supported"),
        (
            {"architectures": [MOE], "text_config": {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}},
            "norm_topk_prob False is not supported",
        ),
    ],
)
def test_what_the_config_may_not_ask_for(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(edit(write_folder(tmp_path), **changes))


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"image_processor_type": "Qwen3VLImageProcessor"}, "'Qwen3VLImageProcessor'"),
        ({"patch_size": 14}, "patch_size 14"),
        ({"patch_size": None}, "patch_size 14"),  # which is the class's default
        ({"do_pad": True}, "do_pad True"),
    ],
)
def test_what_the_processor_may_not_ask_for(tmp_path: Path, processor: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write_folder(tmp_path, **processor))


def test_either_place_ties_the_head_and_layers_of_none_are_fed(tmp_path: Path) -> None:
    assert not read_config(write_folder(tmp_path)).text.tie_word_embeddings
    assert read_config(edit(tmp_path, text_config={"tie_word_embeddings": True})).text.tie_word_embeddings
    assert read_config(edit(write_folder(tmp_path), tie_word_embeddings=True)).text.tie_word_embeddings
    assert (
        read_config(edit(tmp_path, vision_config={"deepstack_visual_indexes": []})).text.row_size == TEXT["hidden_size"]
    )


def test_what_a_file_of_experts_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    theirs = Qwen3VLMoeConfig()
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_scaling": ROPE | {"mrope_section": [24, 20, 20]}}
    tower = raw["vision_config"] | {"out_hidden_size": theirs.text_config.hidden_size}
    write(tmp_path, "config.json", raw | {"architectures": [MOE], "text_config": rope, "vision_config": tower})
    text = read_config(tmp_path).text
    assert text.architecture == "Qwen3VLMoeTextModel" and text.experts is not None
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    ):
        assert getattr(text, name) == getattr(theirs.text_config, name), name
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"):
        assert getattr(text.experts, name) == getattr(theirs.text_config, name), name
    assert text.experts.norm_topk_prob and not text.tie_word_embeddings


def test_tensors_of_all_experts_are_read_either_way(tmp_path: Path) -> None:
    """[experts, out, in], as this transformers saves a new model's, and [experts, in, out], as published files are said
    to be; a square one does not say which it is."""
    write_model(tmp_path, EXPERTS)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    whole = [name for name in stored if ".mlp.experts." in name]
    assert len(whole) == 2 * 3

    def layers() -> dict[str, torch.Tensor]:
        config = read_config(tmp_path)
        body = model_class(config.text.architecture)(config.text, scheme_selector(None), torch.float32, CPU)
        tensors = load_file(file)
        ours = {name: tensors[stored] for stored, name in split_names(tensors, config)["text"].items()}
        fill("text", body.targets(set(ours)), ours.items())
        return dict(body.named_buffers())

    expected = layers()
    save_file(stored | {name: stored[name].transpose(1, 2).contiguous() for name in whole}, file)
    found = layers()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    write_model(tmp_path, EXPERTS | {"moe_intermediate_size": 32})
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: is 64 x 64: which of them the inputs are"):
        layers()
