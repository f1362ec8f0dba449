"""Loading: every weight once, in its place, in its shape; from a folder, or at random."""

from __future__ import annotations

import shutil
from pathlib import Path

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

from tessera.checkpoint.weights import fill
from tessera.errors import CheckpointError, ConfigError
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class
from tessera.settings.stages import EngineConfig

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
HIDDEN, INNER = 32, 64


def stored_weights():
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
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


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


@pytest.fixture
def folder(tmp_path):
    """The default model's, without its weights."""
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.safetensors"))


def of_random_weights(folder, **settings):
    config = EngineConfig(weights="random", max_sequences=4, **settings)
    return TextEngine.from_checkpoint(folder, config, ByteTokenizer())


def test_random_weights_need_no_stored_ones_and_repeat(folder):
    answers = []
    for _ in range(2):
        engine = of_random_weights(folder, seed=1)
        engine.submit(make_request([1, 2, 3], max_tokens=20, ignore_eos=True, temperature=5, seed=1))
        events = run(engine)
        assert ends(events) == {"r": "length"}
        answers.append(tokens_of(events))
    assert answers[0] == answers[1]
    assert max(answers[0]) > 256, "ids beyond the tokenizer came up and were detokenized"


def test_context_and_cache_must_make_sense(folder):
    for settings, words in (
        ({"max_model_len": 10**6}, "max_model_len 1000000 exceeds"),
        ({"kv_cache_bytes": 100}, "a cache of 100 bytes holds no block"),
    ):
        with pytest.raises(ConfigError, match=words):
            of_random_weights(folder, **settings)


def test_cache_takes_the_bytes_it_was_given():
    block = 2 * 2 * 4 * 2 * 8 * 4  # keys and values, layers, positions, heads, size, bytes
    engine = tiny_engine(tiny_model(), kv_cache_bytes=10 * block + block // 2)
    assert engine.scheduler.blocks.num_blocks == 10
