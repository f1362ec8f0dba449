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


def internlm2_twin(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama-type weights under InternLM2's names. wqkv's rows: for each key head its queries, its key, its value."""
    leaves = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    twin = {
        "model.tok_embeddings.weight": weights["model.embed_tokens.weight"],
        "model.norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for theirs, ours in leaves.items():
            twin[f"{prefix}{ours}.weight"] = weights[f"{prefix}{theirs}.weight"]
        q, k, v = (weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
        rows = []
        for group in range(KV_HEADS):
            for head in range(HEADS // KV_HEADS):
                first = (group * (HEADS // KV_HEADS) + head) * HEAD_DIM
                rows.append(q[first : first + HEAD_DIM])
            rows.append(k[group * HEAD_DIM : (group + 1) * HEAD_DIM])
            rows.append(v[group * HEAD_DIM : (group + 1) * HEAD_DIM])
        twin[f"{prefix}attention.wqkv.weight"] = torch.cat(rows)
    return twin


class NoText:
    def decode(self, ids, skip_special_tokens):
        return ""

    def stream(self, skip_special_tokens):
        return TextStream(lambda token: b"")

    def encode(self, text, special):
        raise NotImplementedError


class Recorder:
    """A runner that also keeps the logits of every sampled token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.hidden_size, self.cache_salt, self.async_launch = runner.hidden_size, runner.cache_salt, False
        self.graph_steps, self.position_axes = 0, runner.position_axes
        self.weights, self.weight_bytes = runner.weights, runner.weight_bytes
        self.logits: list[torch.Tensor] = []

    def launch(self, batch):
        self.logits.append(self._runner.logits(batch))
        return self._runner.launch(batch)


def answer(config, weights, prompt, tokens, embeddings=None, spans=(), max_model_len=64, positions=None, **engine):
    """Greedy tokens, and logits [tokens, vocabulary], of the engine for one prompt."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = model_class(config.architecture)(config, scheme_selector(None), torch.float32, device)
    fill("the text model", model.targets(weights), weights.items())
    settings = EngineConfig(block_size=4, max_sequences=4, **engine)
    recorder = Recorder(ModelRunner.of_model(model, settings, max_model_len))
    whole = Engine(recorder, NoText(), settings, max_model_len, ())
    spans = np.array(spans, np.int32).reshape(-1, 2)
    request = Request(
        "r",
        np.array(prompt, np.int32),
        spans,
        embeddings,
        np.arange(2 * len(spans)),
        SamplingParameters(max_tokens=tokens),
        positions=positions,
    )
    sequence = whole.submit(request)
    while whole.has_work():
        whole.step()
    return sequence.outputs, torch.cat([rows for rows in recorder.logits if len(rows)])


@torch.no_grad()
def expected(model, prompt, tokens, embeddings=None, spans=()):
    """The same from transformers, one full forward a token."""
    ids, outputs, logits = list(prompt), [], []
    for _ in range(tokens):
        rows = model.get_input_embeddings()(torch.tensor(ids))
        if embeddings is not None:
            where = torch.cat([torch.arange(start, start + length) for start, length in spans])
            rows[where] = embeddings
        logits.append(model(inputs_embeds=rows[None], use_cache=False).logits[0, -1])
        outputs.append(int(logits[-1].argmax()))
        ids.append(outputs[-1])
    return outputs, torch.stack(logits)


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


@pytest.mark.parametrize("attention", ["torch", "sdpa"])
@pytest.mark.parametrize("body", BODIES)
def test_tokens_and_logits_equal_transformers(body, attention):
    config = BODIES[body]
    model = reference(config)
    tokens, logits = answer(config, named_weights(model, config), PROMPT, 8, attention=attention)
    expected_tokens, expected_logits = expected(model, PROMPT, 8)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("max_batched_tokens", [8192, 7])
def test_picture_rows_replace_embeddings(max_batched_tokens):
    config = text_config("Qwen2ForCausalLM")
    model = reference(config)
    spans = [(3, 9), (14, 5)]
    rows = torch.randn(14, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights = named_weights(model, config)
    tokens, logits = answer(config, weights, PROMPT, 6, rows, spans, max_batched_tokens=max_batched_tokens)
    expected_tokens, expected_logits = expected(model, PROMPT, 6, rows, spans)
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


def test_internlm2_equals_its_llama_twin():
    llama = text_config("LlamaForCausalLM")
    model = reference(llama)
    twin = internlm2_twin(named_weights(model, llama))
    tokens, logits = answer(text_config("InternLM2ForCausalLM"), twin, PROMPT, 8)
    expected_tokens, expected_logits = expected(model, PROMPT, 8)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["torch", "sdpa"])
@torch.no_grad()
def test_qwen2_with_three_position_axes_is_qwen2_vl_s_text_model(attention):
    """Logits of prefill and decode within 1e-3, with a picture on a grid and text behind it."""
    sections, tokens = (1, 1, 2), 6
    config = text_config("Qwen2ForCausalLM", mrope_section=sections, tie_word_embeddings=True)
    settings = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig(
        hidden_size=HIDDEN,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, "mrope_section": list(sections)},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(settings).eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    weights = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    rows = torch.randn(12, HIDDEN, generator=generator)
    prompt = [3, 5, *[0] * 12, 9, 11, 2]
    row = np.arange(12)
    grid = 2 + np.stack([row // 6, row % 6 // 3, row % 3])
    positions = np.concatenate([np.tile([0, 1], (3, 1)), grid, np.tile([5, 6, 7], (3, 1))], axis=1).astype(np.int32)
    found, logits = answer(config, weights, prompt, tokens, rows, [(2, 12)], positions=positions, attention=attention)
    ids, expected_logits = list(prompt), []
    for step in range(tokens):
        embedded = model.embed_tokens(torch.tensor(ids))
        embedded[2:14] = rows
        places = np.concatenate([positions, np.tile(8 + np.arange(step), (3, 1))], axis=1)
        hidden = model(inputs_embeds=embedded[None], position_ids=torch.tensor(places)[:, None], use_cache=False)
        expected_logits.append(hidden.last_hidden_state[0, -1] @ model.embed_tokens.weight.T)
        ids.append(int(expected_logits[-1].argmax()))
    assert found == ids[len(prompt) :]
    torch.testing.assert_close(logits, torch.stack(expected_logits), atol=1e-3, rtol=0)
    other = answer(config, weights, prompt, tokens, rows, [(2, 12)], attention=attention)[1]
    assert (other - logits).abs().max() > 0.1, "the positions must matter"
