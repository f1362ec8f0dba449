"""config.json of both layouts, as old and new savers wrote it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_checkpoints import Shape, as_internvl_chat, hf_native

from tessera.errors import CheckpointError
from tessera.models.registry import read_config


@pytest.fixture
def native(tmp_path):
    return hf_native(tmp_path / "native", Shape(text="llama", tie=False))


def edit(folder, change):
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_hf_native(native):
    config = read_config(native)
    assert (config.layout, config.model_type, config.vision.ps_version) == ("hf_native", "internvl", "v2")
    assert (config.vision.image_size, config.vision.patch_size, config.vision.tokens_per_tile) == (448, 56, 16)
    assert config.text.architecture == "LlamaForCausalLM"
    assert (config.text.num_attention_heads, config.text.num_key_value_heads, config.text.head_dim) == (4, 2, 16)
    assert (config.text.rope_theta, config.text.rope_scaling) == (10000.0, None)
    assert not (config.text.attention_bias or config.text.output_bias or config.text.mlp_bias)
    assert (config.eos_token_ids, config.image_token_id) == ((2,), 5)
    assert config.processor["max_patches"] == 12
    assert config.processor["image_seq_length"] == 16


def test_the_two_layouts_of_one_model_read_the_same(native, tmp_path):
    ours, chat = read_config(native), read_config(as_internvl_chat(native, tmp_path / "chat", ps_version="v1"))
    assert (chat.layout, chat.model_type, chat.vision.ps_version) == ("internvl_chat", "internvl_chat", "v1")
    assert replace(chat.vision, ps_version="v2") == ours.vision
    assert replace(chat.pictures, order="columns") == ours.pictures
    assert chat.text.architecture == "InternLM2ForCausalLM"
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rope_theta")
    assert [getattr(chat.text, name) for name in same] == [getattr(ours.text, name) for name in same]
    assert chat.image_token_id is None


def test_qwen2_has_query_key_value_biases_only(tmp_path):
    text = read_config(hf_native(tmp_path)).text
    assert (text.architecture, text.attention_bias, text.output_bias) == ("Qwen2ForCausalLM", True, False)


def test_rope_of_older_savers(native):
    def change(raw):
        del raw["text_config"]["rope_parameters"]
        raw["text_config"] |= {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}}

    config = read_config(edit(native, change))
    assert config.text.rope_theta == 5e5
    assert config.text.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}


def test_what_a_saver_left_out_takes_the_class_default(native):
    def change(raw):
        for name in ("hidden_size", "norm_type", "num_attention_heads"):
            del raw["vision_config"][name]
        del raw["text_config"]["max_position_embeddings"]

    config = read_config(edit(native, change))
    assert (config.vision.hidden_size, config.vision.num_attention_heads) == (1024, 16)
    assert config.vision.norm_type == "layer_norm"
    assert config.text.max_position_embeddings == 2048


def test_what_training_leaves_in_a_section_changes_nothing(native):
    """As published InternVL3.5 files, and unsloth's, have it."""
    left = {name: False for name in ("debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep", "use_fa3")}
    before = read_config(native)
    edit(native, lambda raw: raw["text_config"].update(left, unsloth_version="2026.4.7", unsloth_fixed=True))
    assert read_config(native).text == before.text
    edit(native, lambda raw: raw["text_config"].update(logit_scale=0.5))
    with pytest.raises(CheckpointError, match="setting 'logit_scale' is not supported"):
        read_config(native)


def as_phi3(**settings):
    """Edits a Llama body into a Phi-3 one with heads of 16 and a context of 4096."""
    return lambda raw: raw["text_config"].update(
        {"model_type": "phi3", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | settings
    )


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096, **FACTORS}},
        {"rope_scaling": {"rope_type": "longrope", **FACTORS}, "original_max_position_embeddings": 4096},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}},
    ],
)
def test_longrope_by_its_names(native, settings):
    def change(raw):
        del raw["text_config"]["rope_parameters"]
        as_phi3(max_position_embeddings=131072, sliding_window=262144, **settings)(raw)

    text = read_config(edit(native, change)).text
    assert text.architecture == "Phi3ForCausalLM" and not (text.attention_bias or text.output_bias or text.mlp_bias)
    assert text.rope_scaling == {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"sliding_window": 2047}, "the window of 2047 tokens is shorter than the context of 4096"),
        ({"rope_parameters": {"rope_type": "yarn", **FACTORS}}, "rope type 'yarn'.*default, longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048, **FACTORS}},
            "original_max_position_embeddings 2048 is not supported; supported are 4096",
        ),
    ],
)
def test_what_phi3_may_not_ask_for(native, settings, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        read_config(edit(native, as_phi3(**settings)))


@pytest.mark.parametrize("window", [None, 4096, 262144])
def test_a_window_that_nothing_can_look_beyond_is_none(native, window):
    assert read_config(edit(native, as_phi3(sliding_window=window))).text.max_position_embeddings == 4096


def test_qwen3_has_heads_of_128_and_one_switch_of_biases(native):
    def change(raw):
        del raw["text_config"]["head_dim"]
        raw["text_config"] |= {"model_type": "qwen3", "attention_bias": True, "sliding_window": 4096}

    text = read_config(edit(native, change)).text
    assert (text.architecture, text.head_dim) == ("Qwen3ForCausalLM", 128)
    assert text.attention_bias and text.output_bias


def test_the_original_layout_names_its_conversation(native, tmp_path):
    chat = as_internvl_chat(native, tmp_path / "chat")
    edit(chat, lambda raw: raw.update(template="internvl2_5", system_message="Be brief."))
    config = read_config(chat)
    assert (config.conversation, config.system_message) == ("internvl2_5", "Be brief.")
    assert (read_config(native).conversation, read_config(native).system_message) == (None, None)


@pytest.mark.parametrize(("flag", "stored", "effective"), [(True, True, False), (True, False, True)])
def test_a_stored_output_head_wins_over_the_flag(tmp_path, flag, stored, effective):
    folder = edit(hf_native(tmp_path, Shape(tie=not stored)), lambda raw: raw.update(tie_word_embeddings=flag))
    assert read_config(folder).text.tie_word_embeddings is effective


def test_generation_config_names_the_end_tokens(native):
    (native / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert read_config(native).eos_token_ids == (2, 0)
    (native / "generation_config.json").unlink()
    assert read_config(native).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw.update(architectures=["LlavaForConditionalGeneration"]), "LlavaForConditionalGeneration"),
        (
            lambda raw: raw["text_config"].update(model_type="gemma"),
            "'gemma'.*Qwen2ForCausalLM, Qwen3",
        ),
        (lambda raw: raw["vision_config"].update(norm_type="batch_norm"), "norm_type 'batch_norm'"),
        (lambda raw: raw["vision_config"].update(patch_size=[14, 16]), "patch_size"),
        (lambda raw: raw["vision_config"].update(patch_size=60), "patch_size 60 does not divide"),
        (lambda raw: raw["vision_config"].update(num_attention_heads=5), "5 heads"),
        (lambda raw: raw.update(vision_feature_layer=[-1, -2]), "selected vision layer"),
        (lambda raw: raw.update(vision_feature_layer=7), "selected vision layer"),
        (lambda raw: raw.update(vision_feature_select_strategy="full"), "vision_feature_select_strategy"),
        (lambda raw: raw.update(downsample_ratio=0.4), "downsample_ratio 0.4"),
        (lambda raw: raw["text_config"].update(use_sliding_window=True), "sliding-window"),
        (lambda raw: raw["text_config"].update(layer_types=["sliding_attention"]), "sliding-window.*layer type"),
        (lambda raw: raw["text_config"]["rope_parameters"].update(rope_type="yarn"), "rope type 'yarn'"),
        (lambda raw: raw["text_config"]["rope_parameters"].update(rope_type="longrope"), "rope type 'longrope'"),
        (lambda raw: raw["text_config"].update(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (lambda raw: raw.pop("vision_config"), "no section 'vision_config'"),
    ],
)
def test_what_is_not_supported_is_named(native, change, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        read_config(edit(native, change))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_config(tmp_path)


def test_code_named_by_a_checkpoint_is_never_run(native, tmp_path):
    chat = as_internvl_chat(native, tmp_path / "chat")
    for name in ("modeling_internvl_chat.py", "modeling_internlm2.py"):
        (chat / name).write_text("raise SystemExit('remote code was run')")
    assert "auto_map" in read_config(chat).raw
