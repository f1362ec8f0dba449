"""The engine's bench: ceilings as measured, requests that share nothing, and its measures on a small engine."""

from __future__ import annotations

import numpy as np
import pytest
from bench import engine as bench_engine
from bench.engine import SHAPE, Prompts, Shape, decode_step_s, prefill_tokens_per_s

from tessera.engine.engine import Engine
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SMALL = bench_engine.figures.ROOT / "build" / "default_model" / "checkpoint"


@pytest.fixture
def small():
    """(engine, prompts) of the default model with random weights."""
    config = EngineConfig(weights="random", max_batched_tokens=1024, max_sequences=16, kv_cache_bytes=64 << 20)
    text = read_config(SMALL).text
    return Engine.from_checkpoint(SMALL, config), Prompts(text.hidden_size, text.vocab_size, "cpu")


def test_the_shape_is_the_7b_body_and_its_ceilings_those_of_one_h200():
    text = read_config(SHAPE).text
    shape = Shape.of(text)
    assert shape.body == pytest.approx(6.53e9, rel=2e-3)
    assert shape.kv_bytes == 57_344
    ceilings = shape.ceilings()
    assert ceilings["decode.b1.ms"] == pytest.approx(3.3, abs=0.05)
    assert ceilings["decode.b64.ms"] == pytest.approx(3.3 + 0.39, abs=0.05)
    assert ceilings["prefill.tflops"] == pytest.approx(629, abs=2)


def test_no_two_requests_share_a_block():
    prompts = Prompts(hidden_size=8, vocab_size=640, device="cpu")
    requests = [prompts.request(max_tokens=4) for _ in range(200)]
    for request in requests:
        request.validate(vocab_size=640, hidden_size=8)
        assert request.sampling.ignore_eos and request.sampling.temperature == 0
    assert {len(request.input_ids) for request in requests} == {316}
    assert {tuple(map(tuple, request.spans)) for request in requests} == {((12, 256),)}
    assert len({request.digest.tobytes() for request in requests}) == 200
    assert len({request.input_ids[:12].tobytes() for request in requests}) == 200
    rows = requests[0].embeddings.float().numpy()
    assert np.std(rows) == pytest.approx(0.02, rel=0.1)


def test_prefill_is_measured_over_full_steps(small):
    engine, prompts = small
    rate, step = prefill_tokens_per_s(engine, prompts, warm_up=1, steps=2, budget=1024, waiting=16)
    assert step == 1024 and rate > 0
    assert not engine.has_work() and engine.metrics.cached_tokens == 0


def test_decode_is_measured_step_by_step_and_the_rest_cancelled(small):
    engine, prompts = small
    seconds = decode_step_s(engine, prompts, batch=3, skip=4, steps=5, max_tokens=64)
    assert len(seconds) == 5 and min(seconds) > 0
    assert engine.metrics.finished == {"cancelled": 3}
    with pytest.raises(RuntimeError, match="too few"):
        decode_step_s(engine, prompts, batch=1, skip=4, steps=5, max_tokens=6)
