"""Loading: every weight once, in its place, in its shape; from a folder, or at random."""

from __future__ import annotations

import json

import pytest
import torch
from engine_fakes import (
    ByteTokenizer,
    TextEngine,
    ends,
    make_request,
    run,
    tiny_config,
    tiny_engine,
    tiny_model,
    tokens_of,
)
from safetensors.torch import save_file

from tessera.checkpoint.weights import fill
from tessera.errors import CheckpointError, ConfigError
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class
from tessera.settings.stages import EngineConfig

HIDDEN, INNER = 32, 64


def stored_weights(prefix=""):
    """A checkpoint of tiny_config, its tensors numbered by a generator."""
    shapes = {"model.embed_tokens.weight": (300, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        for name, rows, columns in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32)):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, columns)
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (HIDDEN, 32)
        for name in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (INNER, HIDDEN)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        for name in ("input", "post_attention"):
            shapes[f"model.layers.{layer}.{name}_layernorm.weight"] = (HIDDEN,)
    generator = torch.Generator().manual_seed(0)
    return {prefix + name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def build(**changes):
    config = tiny_config(**changes)
    return model_class(config.architecture)(config, scheme_selector(None), torch.float32, torch.device("cpu"))


def load(model, tensors):
    fill("the text model", model.targets({name for name, _ in tensors}), tensors)


def test_parts_land_in_their_rows():
    model, weights = build(), stored_weights()
    load(model, weights.items())
    qkv = torch.cat([weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.layers[1].qkv.weight, qkv)
    gate_up = torch.cat([weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(model.layers[0].gate_up.weight, gate_up)


def test_missing_left_over_repeated_and_misshapen_weights_are_named():
    weights = stored_weights()
    del weights["model.layers.1.self_attn.k_proj.bias"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(INNER + 1, HIDDEN)
    weights["model.norm.weight"] = torch.zeros(1)  # would broadcast
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(INNER, HIDDEN)
    twice = [*weights.items(), ("model.embed_tokens.weight", weights["model.embed_tokens.weight"])]
    with pytest.raises(CheckpointError) as caught:
        load(build(), twice)
    for fault in (
        "layers.1.self_attn.k_proj.bias: missing",
        "layers.0.mlp.up_proj.weight: has shape [65, 32], expected [64, 32]",
        "norm.weight: has shape [1], expected [32]",
        "layers.2.mlp.up_proj.weight: left over",
        "embed_tokens.weight: given twice",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize("wrong", ["weight", "bias"])
@pytest.mark.parametrize("last", ["weight", "bias"])
def test_a_misshapen_tensor_is_named_whichever_of_its_module_comes_last(wrong, last):
    """A module is judged with the last of its tensors, which may be another than the wrong one."""
    module = "model.layers.0.self_attn.q_proj"
    weights = stored_weights()
    weights[f"{module}.{wrong}"] = weights[f"{module}.{wrong}"][:-1]
    weights[f"{module}.{last}"] = weights.pop(f"{module}.{last}")
    with pytest.raises(CheckpointError) as caught:
        load(build(), weights.items())
    assert str(caught.value).startswith(f"weights of the text model: {module}.{wrong}: has shape [")
    assert str(caught.value).count(module) == 1


def test_wrong_wqkv_is_named():
    model = build(architecture="InternLM2ForCausalLM", attention_bias=False)
    with pytest.raises(
        CheckpointError, match=r"layers.0.attention.wqkv.weight: has shape \[63, 32\], expected \[64, 32\]"
    ):
        load(model, [("model.layers.0.attention.wqkv.weight", torch.zeros(63, 32))])


def test_unknown_architecture_and_quantization():
    with pytest.raises(CheckpointError, match="'GemmaForCausalLM'"):
        model_class("GemmaForCausalLM")
    with pytest.raises(CheckpointError, match="'bitsandbytes'"):
        scheme_selector({"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="gelu"):
        build(hidden_act="gelu")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder with a text body; the engine reads nothing else of it."""
    text = dict(
        model_type="qwen2",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=[28, 28], patch_size=[14, 14])
    config = dict(architectures=["InternVLForConditionalGeneration"], model_type="internvl", image_token_id=5)
    config |= dict(text_config=text, vision_config=vision, tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    save_file(stored_weights("language_model."), tmp_path / "model.safetensors")
    return tmp_path


def test_engine_from_a_checkpoint_folder(folder):
    engine = TextEngine.from_checkpoint(folder, EngineConfig(max_sequences=4), ByteTokenizer())
    engine.submit(make_request([1, 2, 3], max_tokens=6, ignore_eos=True))
    found = tokens_of(run(engine))
    model = build()
    load(model, stored_weights().items())
    other = tiny_engine(model)
    other.submit(make_request([1, 2, 3], max_tokens=6, ignore_eos=True))
    assert found == tokens_of(run(other))


def test_random_weights_need_no_stored_ones_and_repeat(folder):
    (folder / "model.safetensors").unlink()
    answers = []
    for _ in range(2):
        config = EngineConfig(weights="random", max_sequences=4, seed=1)
        engine = TextEngine.from_checkpoint(folder, config, ByteTokenizer())
        engine.submit(make_request([1, 2, 3], max_tokens=20, ignore_eos=True, temperature=5, seed=1))
        events = run(engine)
        assert ends(events) == {"r": "length"}
        answers.append(tokens_of(events))
    assert answers[0] == answers[1]
    assert max(answers[0]) > 256, "ids beyond the tokenizer came up and were detokenized"


def test_context_and_cache_must_make_sense(folder):
    with pytest.raises(ConfigError, match="max_model_len 300 exceeds"):
        TextEngine.from_checkpoint(folder, EngineConfig(max_model_len=300, max_sequences=4), ByteTokenizer())
    with pytest.raises(ConfigError, match="a cache of 100 bytes holds no block"):
        TextEngine.from_checkpoint(folder, EngineConfig(kv_cache_bytes=100, max_sequences=4), ByteTokenizer())


def test_cache_takes_the_bytes_it_was_given():
    block = 2 * 2 * 4 * 2 * 8 * 4  # keys and values, layers, positions, heads, size, bytes
    engine = tiny_engine(tiny_model(), kv_cache_bytes=10 * block + block // 2)
    assert engine.scheduler.blocks.num_blocks == 10
