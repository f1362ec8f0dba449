"""Requests of many kinds in one engine, by chance: each is answered as transformers' processors in a plain loop do."""

import random
import re
from dataclasses import replace

import pytest
import torch
from engine_fakes import EOS, ends, make_request, run, text_of, tiny_engine, tiny_model, tokens_of
from penalties_reference import plain_answer

from tessera.checkpoint.config import ExpertsConfig

MODEL = tiny_model()
EXPERTS = ExpertsConfig(4, 2, 32, True, 1, mlp_only_layers=())
ROWS = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(4))
STOP = (EOS, *range(0, 250, 7))  # enough that a model of random weights meets one now and then
REGEX = "([a-f]{2,5}-){3}[0-9]{4}"
BLOCK = 2 * 2 * 4 * 2 * 8 * 4  # bytes


def requests(count=9, **sampling):
    """Prompts of many lengths that begin alike, every third with one of two pictures."""
    made = []
    for number in range(count):
        ids = [7, 8, 9] * 6 + [number + 20, 30 - number] * (1 + 3 * (number % 4))
        pictures = [(4, 12, number % 2)] * (number % 3 == 0)
        request = make_request(ids, f"{number}", pictures, **(dict(max_tokens=12, ignore_eos=True) | sampling))
        made.append(replace(request, embeddings=ROWS[number % 2]) if pictures else request)
    return made


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


def bits_of(events, name):
    """The tokens of an answer, and all that was reported of them: equal if every bit is."""
    own = [event for event in events if event.request.request_id == name]
    return [[x for event in own for x in event.token_ids], [x for event in own for x in event.logprobs or []]]


def differences(seed, deterministic, model, block_sizes=(4, 7, 16), room=1, **settings):
    """How many requests of a mix are answered with other bits than alone."""
    dice = random.Random(seed)
    same = dict(deterministic=deterministic, kv_cache_dtype=dice.choice(["auto", "fp8"]), eos=STOP, **settings)
    engine = tiny_engine(
        model,
        block_size=dice.choice(block_sizes),
        kv_cache_bytes=dice.choice([30, 60]) * BLOCK * room,
        max_batched_tokens=dice.choice([17, 60, 512]),
        max_sequences=dice.choice([3, 16]),
        drafts=dice.choice([0, 4]),
        **same,
    )
    pools = [{}, {"draft_pool": "all"}] if engine._config.drafts else [{}]
    made = [requests(12, **chosen(dice), **dice.choice(pools))[number] for number in range(12)]
    made = [replace(each, sampling=replace(each.sampling, seed=7, logprobs=5)) for each in made]
    events, waiting = [], list(made)
    while waiting or engine.has_work():
        for request in [waiting.pop() for _ in range(min(len(waiting), dice.randrange(4)))]:
            engine.submit(request)
        if dice.random() < 0.05:
            engine.cancel(dice.choice(made).number)
        events += engine.step()
    alone, found = tiny_engine(model, prefix_cache="off", block_size=block_sizes[-1], **same), 0
    for request in made:
        alone.submit(replace(request, number=-1 - request.number))
        expected, said = bits_of(run(alone), request.request_id), bits_of(events, request.request_id)
        if ends(events)[request.request_id] == "cancelled":
            expected = [whole[: len(part)] for whole, part in zip(expected, said)]
        found += said != expected
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_deterministic_answer_has_the_bits_of_one_that_was_alone(seed):
    """Whatever shares its steps and the pool, whatever is drafted, cut into chunks, cached, preempted or ended."""
    model = MODEL if seed % 2 else tiny_model(architecture="Qwen3MoeForCausalLM", experts=EXPERTS)
    assert differences(seed, True, model) == 0 < differences(seed, False, model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", range(6))
def test_so_it_has_on_a_gpu(seed):
    experts = dict(architecture="Qwen3MoeForCausalLM", experts=EXPERTS) if seed % 3 == 2 else {}
    model = tiny_model(device="cuda", dtype=torch.bfloat16, head_dim=16, **experts)
    assert differences(seed, True, model, (16, 32), 3, device="cuda", graph_batch_size=4 * (seed % 2)) == 0


@pytest.mark.parametrize(
    ("dtype", "stored", "blocks"),
    [("float32", "fp8", 28 * 32 // 12), ("bfloat16", "auto", 56), ("float16", "auto", 56)],  # by the bytes of a head
)
def test_coarser_numbers_change_little(dtype, stored, blocks):
    model, found = tiny_model(), []
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module.register_buffer(key, buffer.to(getattr(torch, dtype)))
    for candidate, dtype_of_cache in ((MODEL, "auto"), (model, stored)):
        engine = tiny_engine(candidate, kv_cache_bytes=28 * BLOCK, kv_cache_dtype=dtype_of_cache)
        engine.submit(requests(1, max_tokens=1, logprobs=0)[0])
        found.append(run(engine)[0].logprobs[0]["logprob"])
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], abs=0.3)
    assert engine.scheduler.blocks.num_blocks == blocks
    # What status and recall say was served.
    assert engine.weights.endswith(", key/value cache in fp8") == (stored == "fp8")
