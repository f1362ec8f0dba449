"""The stages on a GPU against themselves on the CPU, with the default checkpoint (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
from bench.parity import CHECKPOINT, Ours, pictures

from tessera.engine.engine import Engine
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.vision.encoder import VisionEncoder
from tessera.vision.pictures import VisionItem


@pytest.fixture(scope="module")
def on_cpu() -> Ours:
    return Ours.load()


def on_gpu(dtype: str) -> VisionEncoder:
    settings = VisionSettings(runner="graph", device="cuda", dtype=dtype, infer_batch_size=32)
    return VisionEncoder.from_checkpoint(CHECKPOINT, settings)


@pytest.mark.parametrize(("dtype", "least_cosine"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_embeddings_agree(on_cpu, dtype, least_cosine):
    encoder = on_gpu(dtype)
    for jpeg, question in pictures(8):
        prepared, _ = on_cpu.tokens(jpeg, question)
        item = VisionItem(prepared.pixels, prepared.plan, prepared.digest)
        (expected,), (rows,) = on_cpu.encoder.encode([item]), encoder.encode([item])
        cosine = torch.nn.functional.cosine_similarity(rows.float().cpu(), expected, dim=1)
        assert cosine.min() >= least_cosine


def test_greedy_tokens_agree(on_cpu):
    engine = Engine.from_checkpoint(CHECKPOINT, EngineConfig(device="cuda", dtype="float32"))
    whole = Ours(on_cpu.preprocessor, on_gpu("float32"), engine)
    for jpeg, question in pictures(16):
        assert whole.tokens(jpeg, question)[1] == on_cpu.tokens(jpeg, question)[1], question
