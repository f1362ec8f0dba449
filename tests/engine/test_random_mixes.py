"""Requests of many kinds in one engine, by chance: each is answered as transformers' processors in a plain loop do."""

from __future__ import annotations

import random
import re

import pytest
from engine_fakes import EOS, ends, text_of, tiny_engine, tiny_model, tokens_of
from penalties_reference import plain_answer
from test_equivalence import requests

MODEL = tiny_model()
STOP = (EOS, *range(0, 250, 7))  # enough that a model of random weights meets one now and then
REGEX = "([a-f]{2,5}-){3}[0-9]{4}"
BLOCK = 2 * 2 * 4 * 2 * 8 * 4  # bytes


def chosen(dice):
    """Each kind of wish is there or is not."""
    kinds = [
        dict(repetition_penalty=dice.choice([0.7, 1.3, 2.5])),
        dict(frequency_penalty=dice.choice([-0.8, 0.4, 1.9])),
        dict(presence_penalty=dice.choice([-1.0, 0.6, 2.0])),
        dict(no_repeat_ngram_size=dice.choice([1, 2, 3])),
        dict(logit_bias={str(dice.randrange(250)): dice.choice([-100, -2.5, 1, 4]) for _ in range(20)}),
        dict(stop_token_ids=[dice.randrange(250) for _ in range(30)]),
        dict(temperature=dice.choice([0.7, 1.8]), seed=dice.randrange(1000)),
        dict(min_tokens=dice.choice([2, 9, 25])),
        dict(ignore_eos=True),
        dict(logprobs=dice.randrange(3)),
        dict(priority=dice.randrange(-2, 3)),
    ]
    wishes = {name: value for kind in kinds if dice.random() < 0.4 for name, value in kind.items()}
    if "temperature" in wishes and dice.random() < 0.7:
        wishes |= dice.choice([dict(top_k=4), dict(top_p=0.8), dict(top_k=12, top_p=0.9), dict(min_p=0.1, top_p=0.9)])
    return dict(max_tokens=25, ignore_eos=False) | wishes


@pytest.mark.parametrize("seed", range(12))
def test_every_request_is_answered_as_alone(seed):
    dice = random.Random(seed)
    # A key or value is read as it was stored by all, also by the step that stores it.
    stored = dice.choice(["auto", "fp8"])
    engine = tiny_engine(
        MODEL,
        eos=STOP,
        block_size=dice.choice([4, 7]),
        kv_cache_bytes=dice.choice([30, 60, 400]) * BLOCK,
        kv_cache_dtype=stored,
        max_batched_tokens=dice.choice([17, 60, 512]),
        max_sequences=dice.choice([3, 16]),
        prefix_cache=dice.choice(["content", "exclude", "off"]),
    )
    engine._runner.async_launch = dice.random() < 0.7  # as on a GPU: a step is planned before the tokens of the last
    made = [requests(12, **chosen(dice))[number] for number in range(12)]
    for number in (2, 5, 8):
        made[number] = requests(12, regex=REGEX, max_tokens=40, **dict(ignore_eos=False))[number]
    events, waiting = [], list(made)
    while waiting or engine.has_work():
        for request in [waiting.pop() for _ in range(min(len(waiting), dice.randrange(4)))]:
            engine.submit(request)
        if dice.random() < 0.05:
            engine.cancel(dice.choice(made).number)  # one that runs or waits, or is not there
        events += engine.step()
        engine.scheduler.check()
    plain = tiny_engine(MODEL, prefix_cache="off", attention="sdpa", kv_cache_dtype=stored)._runner
    for request in made:
        name = request.request_id
        said, reason = tokens_of(events, name), ends(events)[name]
        if request.sampling.regex is not None:
            assert reason == "cancelled" or (reason == "stop" and re.fullmatch(REGEX, text_of(events, name)))
            continue
        expected = plain_answer(plain, request, () if request.sampling.ignore_eos else STOP)
        assert said == (expected[: len(said)] if reason == "cancelled" else expected), request.sampling
