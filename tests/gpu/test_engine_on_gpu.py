"""The engine on a GPU: graphs, kernels and planning ahead change no token (`make test-gpu`)."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from bench.parity import CHECKPOINT, Ours, pictures

from tessera.engine.drafts.text import TextDraft
from tessera.engine.engine import Engine
from tessera.engine.process.client import EmbeddingPool, EngineProcess
from tessera.engine.sequence import Request
from tessera.errors import ConfigError
from tessera.preprocess.preprocessor import PreprocessRequest
from tessera.prompt.sampling import SamplingParameters
from tessera.settings.stages import EngineConfig

DRAFTED = ("drafted_steps", "drafted_tokens", "accepted_tokens")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["door", "wire", "window"]}, "open": {"type": "boolean"}},
        "required": ["kind", "open"],
        "additionalProperties": False,
    }
)
KV_BYTES_A_TOKEN = 2 * 4 * 1 * 64 * 4  # the default checkpoint's, in float32


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Questions and descriptions of 12 held-out pictures, prepared and encoded on the CPU."""
    ours = Ours.load()
    return [
        ours.request(
            PreprocessRequest(text=question, images=[jpeg]),
            SamplingParameters(max_tokens=4 + 5 * number, ignore_eos=True),
        )[1]
        for number, (jpeg, question) in enumerate(pictures(12))
    ]


def answers(
    requests: list[Request], guessed: list[list[int]] = (), wrong: int = 0, **settings
) -> tuple[list[list[int]], dict[str, int]]:
    """``guessed``: answers that are drafted, one token in that number wrong."""
    config = EngineConfig(**(dict(device="cuda", dtype="float32", kv_cache_bytes=1 << 28, drafts=0) | settings))
    engine = Engine.from_checkpoint(CHECKPOINT, config)
    if guessed:
        drafts = {
            request.number: [token ^ bool(wrong and at % wrong == 1) for at, token in enumerate(answer)]
            for request, answer in zip(requests, guessed)
        }
        engine._drafters = lambda request: [TextDraft(drafts[request.number])]
        # By what steps take, a model as small as this is better off without drafts on some hosts.
        engine.scheduler.tokens_should_be_known = lambda batch: True
    sequences = [engine.submit(request) for request in requests]
    while engine.has_work():
        engine.step()
        engine.scheduler.check()
    return [sequence.outputs for sequence in sequences], engine.metrics.snapshot()


@pytest.fixture(scope="module")
def expected(requests) -> list[list[int]]:
    return answers(requests, device="cpu", attention="sdpa", prefix_cache="off")[0]


WAYS = {
    "graphs": dict(),
    "eager": dict(graph_batch_size=0),
    "few graphs": dict(graph_batch_size=4),
    "pieces": dict(max_batched_tokens=100, max_sequences=16),
    "sdpa": dict(attention="sdpa", graph_batch_size=0),
    "uncached": dict(prefix_cache="off"),
}


@pytest.mark.parametrize("way", WAYS)
def test_same_tokens(way, requests, expected):
    found, counted = answers(requests, **WAYS[way])
    assert found == expected
    assert (counted["graph_steps"] > 0) == (WAYS[way].get("graph_batch_size", 1) > 0)


@pytest.mark.parametrize("wrong", [0, 3, 7])
@pytest.mark.parametrize("way", WAYS)
def test_same_tokens_of_drafts(way, wrong, requests, expected):
    """Beside one request in four that nothing is drafted for."""
    guessed = [answer * (number % 4 > 0) for number, answer in enumerate(expected)]
    found, counted = answers(requests, guessed, wrong, drafts=7, **WAYS[way])
    assert found == expected and counted["drafted_tokens"] > 0
    print(f"drafts, {way}, wrong {wrong}:", {name: counted[name] for name in ("steps", "graph_steps", *DRAFTED)})
    if not wrong:
        assert counted["accepted_tokens"] == counted["drafted_tokens"]


@pytest.mark.parametrize(
    "asked",
    [
        dict(temperature=1.1, seed=5, top_p=0.9, logprobs=2),
        dict(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, no_repeat_ngram_size=3),
        dict(json_schema=SCHEMA, ignore_eos=False, max_tokens=90, temperature=0.9, seed=6),
        dict(json_schema=SCHEMA, ignore_eos=False, max_tokens=90, min_tokens=5, frequency_penalty=0.3),
    ],
    ids=["drawn", "penalties", "schema", "schema under penalties"],
)
def test_same_tokens_of_drafts_whatever_is_asked(requests, asked):
    asking = [replace(request, sampling=replace(request.sampling, **asked)) for request in requests]
    plain, before = answers(asking)
    for wrong in (0, 3):
        found, counted = answers(asking, plain, wrong, drafts=15)
        assert found == plain and counted["drafted_tokens"] > 0
        print(
            f"drafts, {sorted(asked)}: {before['steps']} steps,", {name: counted[name] for name in ("steps", *DRAFTED)}
        )


def test_drafts_in_bfloat16_differ_by_ties_alone(requests):
    """Another kernel sums in another order: where the answers part, both tokens are about as likely."""
    asking = [replace(request, sampling=replace(request.sampling, max_tokens=60, logprobs=5)) for request in requests]
    plain, _ = answers(asking, dtype="bfloat16")
    again, _ = answers(asking, dtype="bfloat16")
    found, counted = answers(asking, plain, 4, dtype="bfloat16", drafts=7)
    assert counted["drafted_tokens"] > 0
    parted = [
        (number, next(at for at, (one, other) in enumerate(zip(a, b)) if one != other))
        for number, (a, b) in enumerate(zip(plain, found))
        if a != b
    ]
    print(
        f"bfloat16: {len(parted)} of {len(plain)} answers part by drafts,",
        sum(map(list.__ne__, plain, again)),
        "without",
    )
    for number, at in parted:
        request = asking[number]
        ids = np.concatenate([request.input_ids, np.array(plain[number][:at], np.int32)])
        longer = replace(request, input_ids=ids, sampling=replace(request.sampling, max_tokens=1))
        logprobs = dict(top_of(longer, dtype="bfloat16"))
        assert abs(logprobs[plain[number][at]] - logprobs[found[number][at]]) < 0.05


def top_of(request: Request, **settings) -> list[tuple[int, float]]:
    """The likeliest next tokens, and their log probabilities."""
    config = EngineConfig(**(dict(device="cuda", kv_cache_bytes=1 << 28) | settings))
    engine = Engine.from_checkpoint(CHECKPOINT, config)
    engine.submit(request)
    reports = []
    while engine.has_work():
        reports += [report for *_, report in engine.step().tokens]
    return list(reports[0].top)


@pytest.mark.parametrize(
    "asked",
    [
        dict(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, no_repeat_ngram_size=3),
        dict(logit_bias=tuple((token, float(token % 5 - 2)) for token in range(200)), stop_token_ids=(7, 11)),
    ],
    ids=["penalties", "biases and tokens that end"],
)
def test_same_tokens_under_penalties(requests, asked):
    """Every third request asks for none."""
    asking = [
        replace(request, sampling=replace(request.sampling, **asked)) if number % 3 else request
        for number, request in enumerate(requests)
    ]
    plain = answers(asking, device="cpu", attention="sdpa", prefix_cache="off")[0]
    found, counted = answers(asking)
    assert found == plain and counted["graph_steps"] > 0


def test_same_tokens_after_preemption(requests, expected):
    longest = max(len(request.input_ids) + request.sampling.max_tokens for request in requests)
    preemptions = 0
    for blocks in (72, 77, 82, 87, 117):  # a little too few for two prompts and their answers
        room = 16 * blocks * KV_BYTES_A_TOKEN
        found, counted = answers(requests, kv_cache_bytes=room, prefix_cache="off", max_model_len=longest)
        assert found == expected
        preemptions += counted["preemptions"]
    assert preemptions > 0


@pytest.fixture(scope="module")
def expected_in_fp8(requests) -> list[list[int]]:
    return answers(requests, device="cpu", attention="sdpa", prefix_cache="off", kv_cache_dtype="fp8")[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_in_fp8_differs_by_ties_alone(way, requests, expected_in_fp8):
    """A key that is computed in another order may fall to e4m3's next number, a sixteenth away."""
    found, counted = answers(requests, kv_cache_dtype="fp8", **WAYS[way])
    same = sum(a == b for a, b in zip(found, expected_in_fp8))
    print(f"fp8 cache, {way}: {same} of {len(found)} answers as on the CPU")
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in expected_in_fp8]
    assert same >= len(found) // 2
    assert (counted["graph_steps"] > 0) == (WAYS[way].get("graph_batch_size", 1) > 0)


def test_bfloat16_differs_by_ties_alone(requests, expected):
    found, _ = answers(requests, dtype="bfloat16")
    same = sum(a == b for a, b in zip(found, expected))
    first = sum(a[0] == b[0] for a, b in zip(found, expected))
    print(f"bfloat16: {same} of {len(expected)} answers and {first} first tokens as in float32")
    assert first == len(expected)


@pytest.mark.parametrize("pool_bytes", [1 << 24, 1 << 17], ids=["in the slab", "most spilled"])
def test_an_engine_in_its_own_process_reads_rows_from_the_gpu(requests, expected, pool_bytes):
    found: dict[int, list[int]] = {}
    ended = threading.Semaphore(0)

    def listen(event):
        found.setdefault(event.request.number, []).extend(event.token_ids)
        if event.finish_reason is not None:
            ended.release()

    config = EngineConfig(device="cuda", dtype="float32", kv_cache_bytes=1 << 28, embedding_pool_bytes=pool_bytes)
    process = EngineProcess(CHECKPOINT, config, lambda: None)
    bare = [replace(request, embeddings=None) for request in requests]
    for request, whole in zip(bare, requests):
        rows = whole.embeddings.cuda()
        process.submit(request, listen, rows)
        rows.zero_()  # its owner may reuse it at once
    for _ in bare:
        assert ended.acquire(timeout=60)
    assert [found[request.number] for request in bare] == expected
    assert process.counts()["embeddings_on_cpu"] == 0
    process.stop()


@pytest.mark.parametrize("way", ["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_are_not_finite_end_their_request_alone(way, dtype, requests):
    config = EngineConfig(device="cuda", dtype=dtype, kv_cache_bytes=1 << 28, **WAYS[way])
    engine = Engine.from_checkpoint(CHECKPOINT, config)
    sick, *others = requests
    broken = replace(sick, embeddings=torch.full_like(sick.embeddings, float("nan")))
    answered, ends = [], []
    for batch in (others, [broken, *others]):
        sequences = [engine.submit(request) for request in batch]
        while engine.has_work():
            ends += engine.step().ends
            engine.scheduler.check()
        answered.append([sequence.outputs for sequence in sequences])
    assert [end.number for end in ends if end.reason == "error"] == [broken.number]
    assert [len(outputs) for outputs in answered[1]] == [0, *map(len, answered[0])]
    if dtype == "float32":  # in bfloat16 another batch may decide a tie otherwise
        assert answered[1][1:] == answered[0]
    assert engine.metrics.not_finite_logits == 1


def test_a_share_that_does_not_fit_the_card_is_refused():
    with pytest.raises(ConfigError, match="exceed the card"):
        Engine.from_checkpoint(CHECKPOINT, EngineConfig(device="cuda", memory_bytes=1 << 50))
    with pytest.raises(ConfigError, match="raise gpu_memory"):
        Engine.from_checkpoint(CHECKPOINT, EngineConfig(device="cuda", memory_bytes=1 << 30))


def test_rows_beyond_the_pool_travel_by_themselves():
    rows = torch.randn(8, 16, device="cuda")
    torch.cuda.synchronize()  # rows that arrive are complete
    pool = EmbeddingPool(torch.device("cuda"), rows.nbytes)
    first, second = pool.take(rows), pool.take(rows)
    assert torch.equal(first.within(pool.slab), rows)
    assert second.place is None and second.data == rows.cpu().numpy().tobytes()
    assert (pool.places.used, pool.spilled_bytes, pool.arrived_on_cpu) == (rows.nbytes, rows.nbytes, 0)
    pool.give_back(first)
    pool.give_back(second)
    assert (pool.places.used, pool.spilled_bytes) == (0, 0)
    none = pool.take(rows[:0])  # as a request without rows may claim
    pool.give_back(none)
    assert pool.places.used == 0
    assert pool.take(rows.cpu()).place == 0 and pool.arrived_on_cpu == 1
