"""Each text body against transformers on tiny checkpoints of random weights, without a picture: float32, CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import Shape, hf_native, join_experts
from transformers import AutoModelForImageTextToText, DynamicCache

from tessera.engine.engine import Engine
from tessera.engine.sequence import Request, SamplingParameters
from tessera.settings.stages import EngineConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.5 + 0.7 * i for i in range(12)],
    "original_max_position_embeddings": 32,
}


def rope(kind: str, theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return {"rope": (("rope_type", kind), ("rope_theta", theta), *settings.items())}


# Heads of 24: like the published 96 no power of two.
PHI3 = dict(text="phi3", text_hidden=96, head_dim=24, max_position=64)
LONGROPE = Shape(**PHI3, **rope("longrope", **FACTORS))
BODIES = {
    "qwen2": Shape(),
    "qwen2 tied": Shape(tie=True, **rope("default", 1e6)),
    "llama": Shape(text="llama"),
    "llama with biases": Shape(text="llama", text_bias=True, text_mlp_bias=True),
    "llama wide heads": Shape(text="llama", head_dim=32),
    "llama linear": Shape(text="llama", **rope("linear", factor=2.5)),
    "llama3": Shape(text="llama", **rope("llama3", **LLAMA3)),
    "qwen3": Shape(text="qwen3", head_dim=32),
    "qwen3 tied, with biases": Shape(text="qwen3", tie=True, text_bias=True, **rope("default", 1e6)),
    "qwen3_moe": Shape(text="qwen3_moe", head_dim=32),
    "qwen3_moe, weights as they are, tied, with biases": Shape(
        text="qwen3_moe", tie=True, text_bias=True, experts=(("num_experts", 6), ("num_experts_per_tok", 3))
    ),
    "qwen3_moe, dense layers between": Shape(
        text="qwen3_moe",
        text_layers=4,
        experts=(
            *(("num_experts", 8), ("num_experts_per_tok", 2), ("norm_topk_prob", True)),
            *(("decoder_sparse_step", 2), ("mlp_only_layers", [1])),
        ),
    ),
    "phi3": Shape(**PHI3),
    "phi3, all key heads": Shape(**PHI3, text_kv_heads=4),
}


def prompt_of(length: int) -> list[int]:
    return [(13 * i + i * i) % 300 + 20 for i in range(length)]


def both(folder: Path, shape: Shape) -> tuple[Path, Any]:
    hf_native(folder, shape)
    return folder, AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def answer(folder: Path, prompt: list[int], tokens: int, **config: Any) -> list[dict[int, float]]:
    """The five likeliest tokens of each greedy step of the engine, the chosen first, and their log probabilities."""
    engine = Engine.from_checkpoint(folder, EngineConfig(block_size=4, max_sequences=4, **config))
    sampling = SamplingParameters(max_tokens=tokens, ignore_eos=True, logprobs=5)
    no_pictures = np.empty((0, 2), np.int32), None, np.empty(0, np.int64)
    engine.submit(Request("r", np.array(prompt, np.int32), *no_pictures, sampling))
    steps = []
    while engine.has_work():
        steps += [dict(report.top) for _, _, report in engine.step().tokens]
    return steps


def check(steps: list[dict[int, float]], logits: list[torch.Tensor]) -> None:
    for step, row in zip(steps, logits, strict=True):
        expected = row.log_softmax(-1)
        assert next(iter(step)) == int(expected.argmax())
        assert list(step.values()) == pytest.approx([expected[token].item() for token in step], abs=1e-4)


@torch.inference_mode()
def one_forward_a_token(model: Any, prompt: list[int], tokens: int) -> list[torch.Tensor]:
    ids, logits = list(prompt), []
    for _ in range(tokens):
        logits.append(model(input_ids=torch.tensor([ids])).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return logits


@pytest.mark.parametrize("body", BODIES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, body: str) -> None:
    folder, model = both(tmp_path, BODIES[body])
    check(answer(folder, prompt_of(30), 8), one_forward_a_token(model, prompt_of(30), 8))


def test_experts_stored_as_one_tensor(tmp_path: Path) -> None:
    """As transformers holds them, and as each expert's own they give the same answer."""
    folder = hf_native(tmp_path, BODIES["qwen3_moe"])
    alone = answer(folder, prompt_of(30), 4)
    join_experts(folder)
    assert answer(folder, prompt_of(30), 4) == alone
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    check(alone, one_forward_a_token(model, prompt_of(30), 4))


@pytest.mark.parametrize("length", [30, 60, 90])
def test_dynamic_ntk_follows_each_sequence_s_own_length(tmp_path: Path, length: int) -> None:
    """Below, across and beyond the trained 64 positions. With its cache, transformers keeps earlier keys under the base
    of their time, as the engine does."""
    folder, model = both(tmp_path, Shape(text="llama", max_position=64, **rope("dynamic", factor=2.0)))
    steps = answer(folder, prompt_of(length), 8, max_model_len=128)
    check(steps[:1], one_forward_a_token(model, prompt_of(length), 1))
    ids = torch.tensor([prompt_of(length)])
    made = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert [next(iter(step)) for step in steps] == made[0, length:].tolist()


@pytest.mark.parametrize(("length", "tokens"), [(20, 8), (33, 8), (60, 4)])
def test_longrope_of_prompts_on_either_side_of_the_trained_length(tmp_path: Path, length: int, tokens: int) -> None:
    """Trained at 32 positions."""
    folder, model = both(tmp_path, LONGROPE)
    check(answer(folder, prompt_of(length), tokens), one_forward_a_token(model, prompt_of(length), tokens))


@torch.inference_mode()
def test_an_answer_that_grows_long_keeps_its_short_keys(tmp_path: Path) -> None:
    """As the checkpoints' own code does with its cache: 29 short keys, and long ones from position 32 on."""
    folder, model = both(tmp_path, LONGROPE)
    cache, ids, logits = DynamicCache(config=model.config.text_config), prompt_of(29), []
    for _ in range(8):
        logits.append(model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0, -1])
        ids = [int(logits[-1].argmax())]
    check(answer(folder, prompt_of(29), 8), logits)
