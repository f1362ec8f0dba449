"""Preprocessor -> VisionEncoder -> Engine on tiny random checkpoints of each layout: the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import tiny_checkpoints
import torch
from tiny_checkpoints import Shape

from tessera.engine.engine import Engine
from tessera.engine.sequence import Request, SamplingParameters
from tessera.preprocess.preprocessor import Prepared, Preprocessor, PreprocessRequest
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem

TOKENS = 8


def jpeg() -> bytes:
    noise = np.random.default_rng(3).integers(0, 255, (12, 16, 3), np.uint8)
    picture = cv2.resize(noise, (640, 480), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", picture)[1].tobytes()


def prepare(folder: Path) -> Prepared:
    request = PreprocessRequest(text="What is this?", images=[jpeg()], tile_policy={"max_tiles": 2})
    return Preprocessor.from_checkpoint(folder)(request)


def logprobs(folder: Path, prepared: Prepared) -> list[list[tuple[int, float]]]:
    """The five likeliest tokens of each greedy step with their log probabilities."""
    encoder = VisionEncoder.from_checkpoint(folder, VisionSettings(runner="torch"))
    (rows,) = encoder.encode([VisionItem(prepared.pixels, prepared.plan, prepared.digest)])
    engine = Engine.from_checkpoint(folder, EngineConfig())
    sampling = SamplingParameters(max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    engine.submit(Request("r", prepared.input_ids, prepared.spans, rows, prepared.digest, sampling))
    steps = []
    while engine.has_work():
        steps += [list(report.top) for _, _, report in engine.step().tokens]
    assert len(steps) == TOKENS
    return steps


# The picture's prompt is longer than Phi-3's trained 32 tokens; heads of 24 are no power of two, as the published 96.
LONGROPE = (
    ("rope_type", "longrope"),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 32),
    ("short_factor", [1.0 + 0.05 * i for i in range(12)]),
    ("long_factor", [1.2 + 0.5 * i for i in range(12)]),
)
DYNAMIC = (("rope_type", "dynamic"), ("rope_theta", 10000.0), ("factor", 2.0))
SHAPES = {
    "qwen2": Shape(rope=DYNAMIC),
    "llama": Shape(text="llama"),
    "qwen3": Shape(text="qwen3", head_dim=32),
    "qwen3, tied": Shape(text="qwen3", head_dim=8, tie=True),
    "phi3": Shape(text="phi3", text_hidden=96, head_dim=24, text_kv_heads=4, rope=LONGROPE),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_hf_native_layout_gives_transformers_logits(tmp_path: Path, shape: Shape) -> None:
    from transformers import AutoModelForImageTextToText

    folder = tiny_checkpoints.hf_native(tmp_path, shape)
    prepared = prepare(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tiles = torch.from_numpy(prepared.pixels.reshape(-1, 448, 448, 3).copy()).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    ids = torch.from_numpy(prepared.input_ids.astype(np.int64))[None]
    for step in logprobs(folder, prepared):
        with torch.inference_mode():
            logits = model(input_ids=ids, pixel_values=(tiles - mean) / std).logits[0, -1]
        expected = logits.log_softmax(-1)
        for token, value in step:
            assert expected[token].item() == pytest.approx(value, abs=1e-3)
        assert step[0][0] == int(expected.argmax())
        ids = torch.cat([ids, torch.tensor([[step[0][0]]])], dim=1)


@pytest.mark.parametrize(("text", "body"), [("internlm2", "llama"), *((body, body) for body in SHAPES)])
def test_the_original_layout_gives_its_native_twins_logits(tmp_path: Path, text: str, body: str) -> None:
    native = tiny_checkpoints.hf_native(tmp_path / "native", SHAPES[body])
    chat = tiny_checkpoints.as_internvl_chat(native, tmp_path / "chat", text=text.removesuffix(", tied"))
    prepared = prepare(chat)  # its own template and tokenizer; the twin gets the same ids
    for ours, twin in zip(logprobs(chat, prepared), logprobs(native, prepared), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in twin]
        assert [value for _, value in ours] == pytest.approx([value for _, value in twin], abs=1e-3)
