"""Each text body against transformers on random tiny checkpoints: fp32, CPU, same weights, same inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tessera.checkpoint.config import TextConfig
from tessera.checkpoint.weights import fill
from tessera.engine.engine import Engine
from tessera.engine.execution.model_runner import ModelRunner
from tessera.engine.sequence import Request, SamplingParameters
from tessera.linear.quantization import scheme_selector
from tessera.models.registry import model_class
from tessera.prompt.tokenizer import TextStream
from tessera.settings.stages import EngineConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 48, 6, 2, 8, 3, 97
TOLERANCE = 1e-4


def text_config(architecture: str, **changes) -> TextConfig:
    values = dict(
        architecture=architecture,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=architecture == "Qwen2ForCausalLM",
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        hidden_act="silu",
    )
    return TextConfig(**(values | changes))


def reference(config: TextConfig) -> torch.nn.Module:
    """A random transformers model of the same shape, with weights large enough that mistakes show."""
    rope = dict(config.rope_scaling or {"rope_type": "default"}, rope_theta=config.rope_theta)
    shared = dict(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    biases = dict(attention_bias=config.attention_bias)
    own = {
        "Qwen2ForCausalLM": {},
        "Qwen3ForCausalLM": dict(biases, head_dim=config.head_dim),
        "LlamaForCausalLM": dict(biases, mlp_bias=config.mlp_bias, head_dim=config.head_dim),
        "Phi3ForCausalLM": dict(original_max_position_embeddings=rope.get("original_max_position_embeddings", 64)),
    }[config.architecture]
    of_config = getattr(transformers, config.architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, config.architecture)(of_config(**shared, **own))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.ndim > 1 or "bias" in name else 0.2
        parameter.data.normal_(1.0 if "norm" in name else 0.0, spread, generator=generator)
    return model.eval()


def named_weights(model: torch.nn.Module, config: TextConfig) -> dict[str, torch.Tensor]:
    """What a checkpoint would store: everything but a tied head."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


class NoText:
    def stream(self, skip_special_tokens):
        return TextStream(lambda token: b"")


def answer(config, weights, prompt, tokens, max_model_len=64, **engine):
    """Greedy tokens, and logits [tokens, vocabulary], of the engine for one prompt."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = model_class(config.architecture)(config, scheme_selector(None), torch.float32, device)
    fill("the text model", model.targets(weights), weights.items())
    settings = EngineConfig(block_size=4, max_sequences=4, **engine)
    runner, logits = ModelRunner.of_model(model, settings, max_model_len), []
    launch = runner.launch
    runner.launch = lambda batch: logits.append(runner.logits(batch)) or launch(batch)
    whole = Engine(runner, NoText(), settings, max_model_len, ())
    no_pictures = np.empty((0, 2), np.int32), None, np.empty(0, np.int64)
    sequence = whole.submit(
        Request("r", np.array(prompt, np.int32), *no_pictures, SamplingParameters(max_tokens=tokens))
    )
    while whole.has_work():
        whole.step()
    return sequence.outputs, torch.cat([rows for rows in logits if len(rows)])


@torch.no_grad()
def expected(model, prompt, tokens):
    """The same from transformers, one full forward a token."""
    ids, logits = list(prompt), []
    for _ in range(tokens):
        logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


PROMPT = [(17 * i * i + 3 * i + 5) % VOCABULARY for i in range(30)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.7 * i for i in range(6)],
    "original_max_position_embeddings": 32,
}
# Heads of 12: like the published 96 no power of two.
PHI3 = dict(hidden_size=72, head_dim=12, rms_norm_eps=1e-5)
BODIES = {
    "qwen2": text_config("Qwen2ForCausalLM"),
    "qwen2 tied": text_config("Qwen2ForCausalLM", tie_word_embeddings=True, rope_theta=1e6),
    "llama": text_config("LlamaForCausalLM"),
    "llama with biases": text_config("LlamaForCausalLM", attention_bias=True, output_bias=True, mlp_bias=True),
    "llama wide heads": text_config("LlamaForCausalLM", head_dim=16),
    "llama linear": text_config("LlamaForCausalLM", rope_scaling={"rope_type": "linear", "factor": 2.5}),
    "llama3": text_config("LlamaForCausalLM", rope_scaling=LLAMA3),
    "qwen3": text_config("Qwen3ForCausalLM", head_dim=16),
    "qwen3 tied, with biases": text_config(
        "Qwen3ForCausalLM", tie_word_embeddings=True, attention_bias=True, output_bias=True, rope_theta=1e6
    ),
    "phi3": text_config("Phi3ForCausalLM", **PHI3),
    "phi3, all key heads": text_config("Phi3ForCausalLM", num_key_value_heads=6, **PHI3),
}


@pytest.mark.parametrize(("body", "attention"), [*((body, "sdpa") for body in BODIES), ("qwen2", "torch")])
def test_tokens_and_logits_equal_transformers(body, attention):
    config = BODIES[body]
    model = reference(config)
    tokens, logits = answer(config, named_weights(model, config), PROMPT, 8, attention=attention)
    expected_tokens, expected_logits = expected(model, PROMPT, 8)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [30, 60, 90])
def test_dynamic_ntk_follows_each_sequence_s_own_length(length):
    """Below, across and beyond the trained 64 positions; twice, as no length may be remembered."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    config = text_config("LlamaForCausalLM", rope_scaling=scaling)
    prompt = [(13 * i + i * i) % VOCABULARY for i in range(length)]
    weights = named_weights(reference(config), config)
    tokens, logits = answer(config, weights, prompt, 8, max_model_len=128)
    _, first = expected(reference(config), prompt, 1)
    torch.testing.assert_close(logits[:1], first, atol=TOLERANCE, rtol=0)
    # With its cache, transformers keeps earlier keys under the base of their time, as the engine does.
    model = reference(config)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert tokens == ids[0, length:].tolist()


@pytest.mark.parametrize(("length", "tokens"), [(20, 8), (33, 8), (60, 4)])
def test_longrope_of_prompts_on_either_side_of_the_trained_length(length, tokens):
    """Trained at 32 positions. Twice from one engine's weights, as no length may be remembered."""
    config = text_config("Phi3ForCausalLM", rope_scaling=LONGROPE, **PHI3)
    model = reference(config)
    prompt = [(13 * i + i * i) % VOCABULARY for i in range(length)]
    found, logits = answer(config, named_weights(model, config), prompt, tokens)
    expected_tokens, expected_logits = expected(model, prompt, tokens)
    assert found == expected_tokens
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_an_answer_that_grows_long_keeps_its_short_keys():
    """As the checkpoints' own code does with its cache: 29 short keys, and long ones from position 32 on."""
    config = text_config("Phi3ForCausalLM", rope_scaling=LONGROPE, **PHI3)
    model = reference(config)
    found, logits = answer(config, named_weights(model, config), PROMPT[:29], 8)
    cache, ids, expected_logits = transformers.DynamicCache(config=model.config), PROMPT[:29], []
    for _ in range(8):
        expected_logits.append(model(torch.tensor([ids]), past_key_values=cache).logits[0, -1])
        ids = [int(expected_logits[-1].argmax())]
    assert found == [int(row.argmax()) for row in expected_logits]
    torch.testing.assert_close(logits, torch.stack(expected_logits), atol=TOLERANCE, rtol=0)
