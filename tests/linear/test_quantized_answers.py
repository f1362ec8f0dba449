"""Quantized checkpoints give the logits of transformers' model with the same weights and the same rounded inputs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from packers import FORMATS, quantize_folder
from safetensors.torch import load_file
from tiny_checkpoints import Shape, hf_native

from tessera.engine.engine import Engine
from tessera.engine.execution.model_runner import ModelRunner
from tessera.engine.sequence import Request, SamplingParameters
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SHAPE = Shape(text_hidden=256, head_dim=64, text_mlp=384, vision_layers=1)
PROMPT = [(17 * i * i + 3 * i + 5) % 200 for i in range(21)]
TOKENS = 4


class Recorder:
    """A runner that keeps the logits of every sampled token."""

    def __init__(self, runner):
        self._runner = runner
        self.logits = []

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, batch):
        self.logits.append(self._runner.logits(batch))
        return self._runner.launch(batch)


def answer(folder, ids=tuple(PROMPT), spans=(), rows=None, digest=(), positions=None):
    """Greedy tokens, and logits [TOKENS, vocabulary]."""
    config = EngineConfig(block_size=4, max_sequences=2, threads=1)
    recorder = Recorder(ModelRunner.from_checkpoint(read_config(folder), config, 64))
    engine = Engine(recorder, None, config, 64, ())
    spans = np.array(spans, np.int32).reshape(-1, 2)
    prompt = np.array(ids, np.int32), spans, rows, np.array(digest, np.int64)
    sampling = SamplingParameters(max_tokens=TOKENS)
    sequence = engine.submit(Request("r", *prompt, sampling, positions=positions))
    while engine.has_work():
        engine.step()
    return sequence.outputs, torch.cat([rows for rows in recorder.logits if len(rows)])


@torch.no_grad()
def expected(folder, weights, activations):
    """The same from transformers: ``weights`` in place of the quantized ones, and their inputs rounded."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = transformers.AutoConfig.for_model(**text)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    stored = {
        name.removeprefix("language_model."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    stored |= {f"{module.removeprefix('language_model.')}.weight": w for module, w in weights.items()}
    model.load_state_dict({name: stored[name] for name in model.state_dict()})
    for module in weights:
        linear = model.get_submodule(module.removeprefix("language_model."))
        linear.register_forward_pre_hook(lambda _, inputs: (activations(inputs[0]),))
    ids, logits = list(PROMPT), []
    for _ in range(TOKENS):
        logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :], torch.stack(logits)


@pytest.mark.parametrize(
    ("form", "difference"),
    [
        ("awq 32", 1e-4),
        ("gptq desc_act", 1e-4),
        ("packed asym", 1e-4),
        # A value may lie between two of FP8's and be rounded the other way where a CPU adds in another order: a step of
        # 1/16 of it, in the logits of that token.
        ("float channel dynamic", 0.3),
        ("float tensor static", 0.3),
        ("fp8 blocks", 0.3),
    ],
)
def test_logits_are_those_of_the_fake_quantized_model(tmp_path, form, difference):
    folder = hf_native(tmp_path, SHAPE)
    plain = answer(folder)[1]
    weights = quantize_folder(folder, FORMATS[form])
    tokens, logits = answer(folder)
    expected_tokens, expected_logits = expected(folder, weights, FORMATS[form].activations)
    assert tokens == expected_tokens
    differences = (logits - expected_logits).abs().amax(dim=1)
    assert differences.max() < difference and differences.min() < 1e-4
    assert (plain - expected_logits).abs().max() > 10 * difference, "it must not be the unquantized model"
