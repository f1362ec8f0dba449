"""The same greedy tokens from `transformers` and from our engine, of a checkpoint that we quantized, and of one that
compressed-tensors' own compressor made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import quantize_fakes
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams

from tessera_quantize.checkpoint import quantization_config

TOKENS = 12
PROMPTS = ([5, 9, 40, 41, 7, 12], [30, 2, 8, 8, 21, 60, 11, 3, 17])


def ours(folder: Path) -> list[list[int]]:
    no_pictures = np.empty((0, 2), np.int32), None, np.empty(0, np.int64)
    return quantize_fakes.greedy(folder, [(np.array(prompt, np.int32), *no_pictures) for prompt in PROMPTS], TOKENS)


@torch.inference_mode()
def of_transformers(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """In float32, in which both compute then, so that random weights cannot make a tie of two tokens."""
    return quantize_fakes.checkpoint(tmp_path_factory.mktemp("source"), "native qwen2", torch.float32)


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_transformers_reads_ours_and_says_the_same(tmp_path, source, method):
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    out = quantize_fakes.made(quantize_fakes.job(source, tmp_path / "out", pictures, method))
    tokens = of_transformers(out)
    assert len({tuple(answer) for answer in tokens}) == len(PROMPTS)
    assert ours(out) == tokens


@pytest.mark.parametrize(("method", "symmetric"), [("rtn", False), ("rtn", True), ("fp8", True)])
def test_we_read_what_compressed_tensors_itself_wrote(tmp_path, source, method, symmetric):
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    raw = quantization_config(method, 32, symmetric, ["re:.*vision_tower.*", "re:.*projector.*", "lm_head"])
    raw["quantization_status"] = "initialized"
    settings = {name: value for name, value in raw.items() if name != "quant_method"}
    config = QuantizationConfig.model_validate(settings)
    apply_quantization_config(model, config)
    for module in model.modules():
        if scheme := getattr(module, "quantization_scheme", None):
            weight = module.weight.data.float()
            groups = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if not symmetric:
                module.weight_zero_point.data.copy_(zero)
    ModelCompressor(quantization_config=config).compress_model(model)
    out = tmp_path / "out"
    model.save_pretrained(out)
    raw["quantization_status"] = "compressed"
    config_json = json.loads((out / "config.json").read_text()) | {"quantization_config": raw}
    (out / "config.json").write_text(json.dumps(config_json))
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        if (source / name).exists():
            (out / name).write_bytes((source / name).read_bytes())
    assert ours(out) == of_transformers(out)
