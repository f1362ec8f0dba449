"""The engine's bench: ceilings as measured, requests that share nothing, and its measures on a small engine."""

from __future__ import annotations

import pytest
from bench import engine as bench_engine
from bench.engine import SHAPE, Prompts, Shape, decode_step_s, prefill_tokens_per_s

from tessera.engine.engine import Engine
from tessera.models.registry import read_config
from tessera.settings.stages import EngineConfig

SMALL = bench_engine.figures.ROOT / "build" / "default_model" / "checkpoint"


def test_the_ceilings_are_those_of_the_7b_body_on_one_h200():
    ceilings = Shape.of(read_config(SHAPE).text).ceilings()
    assert ceilings["decode.b1.ms"] == pytest.approx(3.3, abs=0.05)
    assert ceilings["decode.b64.ms"] == pytest.approx(3.3 + 0.39, abs=0.05)
    assert ceilings["prefill.tflops"] == pytest.approx(629, abs=2)


def test_steps_are_measured_and_no_two_requests_share_a_block():
    config = EngineConfig(weights="random", max_batched_tokens=1024, max_sequences=16, kv_cache_bytes=64 << 20)
    text = read_config(SMALL).text
    engine, prompts = Engine.from_checkpoint(SMALL, config), Prompts(text.hidden_size, text.vocab_size, "cpu")
    rate, step = prefill_tokens_per_s(engine, prompts, warm_up=1, steps=2, budget=1024, waiting=16)
    assert step == 1024 and rate > 0  # full steps
    assert not engine.has_work() and engine.metrics.cached_tokens == 0
    seconds = decode_step_s(engine, prompts, batch=3, skip=4, steps=5, max_tokens=64)
    assert len(seconds) == 5 and min(seconds) > 0
    assert engine.metrics.finished["cancelled"] == 3
    with pytest.raises(RuntimeError, match="too few"):
        decode_step_s(engine, prompts, batch=1, skip=4, steps=5, max_tokens=6)
