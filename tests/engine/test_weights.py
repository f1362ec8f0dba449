"""Loading: every weight once, in its place, in its shape; from a folder, or at random."""

import shutil
from pathlib import Path

import pytest
import torch
from engine_fakes import TextEngine, ends, make_request, run, tiny_config, tokens_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from tessera.checkpoint.weights import fill
from tessera.engine.execution.memory_budget import engine_share
from tessera.errors import CheckpointError, ConfigError
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class
from tessera.settings.stages import EngineConfig

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
HIDDEN, INNER = 32, 64


def stored_weights():
    """A checkpoint of tiny_config, as transformers names and shapes it."""
    config = tiny_config()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(config, name) for name in names}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=config.vocab_size, tie_word_embeddings=True, **sizes))
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def build(**changes):
    config = tiny_config(**changes)
    return model_class(config.architecture)(config, scheme_selector(None), torch.float32, torch.device("cpu"))


def load(model, tensors):
    fill("the text model", model.targets({name for name, _ in tensors}), tensors)


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
    return TextEngine.from_checkpoint(folder, config)


def test_random_weights_need_no_stored_ones_and_repeat(folder):
    answers = []
    for _ in range(2):
        engine = of_random_weights(folder, seed=1)
        engine.submit(make_request([1, 2, 3], max_tokens=20, ignore_eos=True, temperature=5, seed=1))
        events = run(engine)
        assert ends(events) == {"r": "length"}
        answers.append(tokens_of(events))
    assert answers[0] == answers[1]


def test_context_and_cache_must_make_sense(folder):
    for settings, words in (
        ({"max_model_len": 10**6}, "max_model_len 1000000 exceeds"),
        ({"kv_cache_bytes": 100}, "a cache of 100 bytes holds no block"),
    ):
        with pytest.raises(ConfigError, match=words):
            of_random_weights(folder, **settings)


GIB = 1 << 30
POOL = {"embedding_pool_bytes": 4 * GIB}


def test_the_engine_gets_its_share_or_what_the_pool_of_rows_leaves_of_nine_tenths():
    assert engine_share(EngineConfig(**POOL), 140 * GIB) == 122 * GIB
    assert engine_share(EngineConfig(memory_bytes=20 * GIB, **POOL), 140 * GIB) == 20 * GIB


@pytest.mark.parametrize(("memory", "total"), [(0, 4), (17, 20)])
def test_shares_that_exceed_the_card_are_named(memory, total):
    with pytest.raises(ConfigError, match=r"4.0 GiB for waiting pictures .* exceed the card's .* lower gpu_memory"):
        engine_share(EngineConfig(memory_bytes=memory * GIB, **POOL), total * GIB)
