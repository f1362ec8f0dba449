"""A tiny real model answers the same however its work is cut up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_fakes import make_request, run, tiny_engine, tiny_model, tokens_of

MODEL = tiny_model()
ROWS = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(4))


def requests(count=9, **sampling):
    """Prompts of many lengths that begin alike, every third with one of two pictures."""
    made = []
    for number in range(count):
        ids = [7, 8, 9] * 6 + [number + 20, 30 - number] * (1 + 3 * (number % 4))
        pictures = [(4, 12, number % 2)] * (number % 3 == 0)
        wishes = dict(max_tokens=12, ignore_eos=True) | sampling
        request = make_request(ids, f"{number}", pictures, **wishes)
        made.append(replace(request, embeddings=ROWS[number % 2]) if pictures else request)
    return made


def answers(engine, made, together=True):
    """Tokens of each request, all in flight at once or one after the other."""
    events = []
    for request in made:
        engine.submit(request)
        if not together:
            events += run(engine)
    events += run(engine)
    return [tokens_of(events, request.request_id) for request in made]


def test_a_cache_in_fp8_holds_more_blocks_and_is_told():
    block = 2 * 2 * 4 * 2 * (8 + 4)  # 12 bytes a head instead of 32
    engine = tiny_engine(MODEL, kv_cache_bytes=28 * block, kv_cache_dtype="fp8")
    assert engine.scheduler.blocks.num_blocks == 28
    assert engine.weights == "float32, key/value cache in fp8"  # what status and recall say was served


def test_a_cache_in_fp8_changes_little():
    found = []
    for stored in ("auto", "fp8"):
        engine = tiny_engine(MODEL, kv_cache_dtype=stored)
        engine.submit(requests(1, max_tokens=1, logprobs=0)[0])
        found.append(run(engine)[0].logprobs[0]["logprob"])
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], abs=0.3)


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_second_run_is_served_from_the_cache_with_the_same_tokens(stored):
    engine = tiny_engine(MODEL, kv_cache_dtype=stored)
    first, before = answers(engine, requests()), engine.metrics.cached_tokens
    assert answers(engine, requests()) == first
    assert engine.metrics.cached_tokens - before > 200


def test_logprobs_are_the_model_s():
    engine = tiny_engine(MODEL)
    engine.submit(make_request([5, 6, 7], max_tokens=3, logprobs=2, ignore_eos=True))
    entries = [entry for event in run(engine) for entry in event.logprobs]
    assert len(entries) == 3
    for entry in entries:
        assert set(entry) == {"token_id", "text", "logprob", "top"}
        assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy
        assert entry["top"][0]["logprob"] == pytest.approx(entry["logprob"])
        assert entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]
    # The probability of a sampled continuation does not depend on how its prompt was cut up.
    other = tiny_engine(MODEL, max_batched_tokens=2, max_sequences=1, attention="sdpa")
    other.submit(make_request([5, 6, 7], max_tokens=3, logprobs=2, ignore_eos=True))
    again = [entry["logprob"] for event in run(other) for entry in event.logprobs or []]
    assert again == pytest.approx([entry["logprob"] for entry in entries], abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_stays_close(dtype):
    model = tiny_model()
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module.register_buffer(key, buffer.to(getattr(torch, dtype)))
    entry = []
    for candidate in (MODEL, model):
        engine = tiny_engine(candidate)
        engine.submit(requests(1, max_tokens=1, logprobs=0)[0])
        entry.append(run(engine)[0].logprobs[0])
    assert entry[0]["logprob"] == pytest.approx(entry[1]["logprob"], abs=0.3)
