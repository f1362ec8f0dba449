"""The same greedy tokens from `transformers` and from our engine, of a checkpoint that we quantized."""

from pathlib import Path

import numpy as np
import pytest
import quantize_fakes
import torch

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


@pytest.mark.parametrize(
    ("body", "method"),
    [("native qwen2", "awq"), ("native qwen2", "fp8"), ("qianfan qwen3", "fp8"), ("native qwen3_moe", "gptq")],
)
def test_transformers_reads_ours_and_says_the_same(tmp_path, body, method):
    # In float32, in which both compute then, so that random weights cannot make a tie of two tokens.
    source = quantize_fakes.checkpoint(tmp_path / "source", body, torch.float32, text_mlp=128)
    pictures = quantize_fakes.labelled_folder(tmp_path / "pictures")
    symmetric = "moe" in body  # of transformers' 4 bits for experts, which know no zeros
    out = quantize_fakes.made(quantize_fakes.job(source, tmp_path / "out", pictures, method, symmetric=symmetric))
    tokens = of_transformers(out)
    assert len({tuple(answer) for answer in tokens}) == len(PROMPTS)
    assert ours(out) == tokens
