"""config.json of both layouts, as old and new savers wrote it."""

import json

import pytest
from tiny_checkpoints import Shape, hf_native

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


def test_qwen3_has_heads_of_128_and_one_switch_of_biases(native):
    def change(raw):
        del raw["text_config"]["head_dim"]
        raw["text_config"] |= {"model_type": "qwen3", "attention_bias": True, "sliding_window": 4096}

    text = read_config(edit(native, change)).text
    assert (text.architecture, text.head_dim) == ("Qwen3ForCausalLM", 128)
    assert text.attention_bias and text.output_bias


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
        (lambda raw: raw["text_config"].update(model_type="gemma"), "'gemma'.*Qwen2ForCausalLM, Qwen3"),
        (lambda raw: raw["vision_config"].update(norm_type="batch_norm"), "norm_type 'batch_norm'"),
        (lambda raw: raw["vision_config"].update(patch_size=[14, 16]), "patch_size"),
        (lambda raw: raw["vision_config"].update(patch_size=60), "patch_size 60 does not divide"),
        (lambda raw: raw["vision_config"].update(num_attention_heads=5), "5 heads"),
        (lambda raw: raw.update(vision_feature_layer=[-1, -2]), "selected vision layer"),
        (lambda raw: raw.update(vision_feature_layer=7), "selected vision layer"),
        (lambda raw: raw.update(vision_feature_select_strategy="full"), "vision_feature_select_strategy"),
        (lambda raw: raw.update(downsample_ratio=0.4), "downsample_ratio 0.4"),
        (lambda raw: raw["text_config"].update(use_sliding_window=True), "sliding-window"),
        (
            lambda raw: raw["text_config"].update(model_type="phi3", sliding_window=2047),
            "the window of 2047 tokens is shorter than the context of 4096",
        ),
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
