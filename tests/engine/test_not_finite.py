"""NaN or infinite logits: their request ends with an error that names the step, nobody else notices."""

from dataclasses import replace

import pytest
import torch
from engine_fakes import ends, make_engine, make_request, run, tiny_engine, tiny_model, tokens_of

from tessera.engine.execution.sampler import SamplingRow, greedy, sample
from tessera.engine.sequence import NOT_FINITE, SamplingParameters
from tessera.kernels.transfer import Moment

MODEL = tiny_model()
PROMPT = [1, 2, *[0] * 12, *range(11, 19)]


def picture_request(name, row, **sampling):
    """A question about a picture whose rows are all ``row``."""
    rows = torch.full((12, 32), float(row))
    request = make_request(PROMPT, name, [(2, 12, 7)], **(dict(max_tokens=6, ignore_eos=True) | sampling))
    return replace(request, embeddings=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "asked",
    [
        dict(),
        dict(temperature=0.8, top_k=3, top_p=0.5),
        dict(logprobs=2),
        dict(temperature=1, logprobs=0),
        dict(children=(1, 4)),
        dict(forbidden=frozenset({2})),
    ],
    ids=str,
)
def test_a_row_with_one_odd_logit_has_no_token(dtype, odd, asked):
    logits = torch.linspace(-2, 3, 24).view(3, 8).to(dtype)
    logits[1, 5] = odd
    named = {name: asked[name] for name in ("children", "forbidden") if name in asked}
    parameters = SamplingParameters.parse({key: value for key, value in asked.items() if key not in named})
    rows = [SamplingRow(parameters, 3, 0, **named) for _ in range(3)]
    found = [token for token, _ in sample(logits.clone(), rows, Moment(logits.device)).tokens()]
    assert found[1] == NOT_FINITE and found[0] >= 0 and found[2] >= 0
    assert greedy(logits).tolist() == [7, NOT_FINITE, 7]
    assert greedy(torch.tensor([[1e30, -1e30, 0]])).tolist() == [0]  # which is no fault


@pytest.mark.parametrize("async_launch", [False, True])
@pytest.mark.parametrize("asked", [dict(), dict(temperature=1.0, seed=1), dict(logprobs=1)], ids=str)
def test_only_the_request_itself_ends(async_launch, asked):
    """The sick one comes first, so that it holds block 0, which pads the others' block tables."""

    def engine():
        made = tiny_engine(MODEL)
        made._runner.async_launch = async_launch
        return made

    others = [
        make_request([5, 6, number] * (2 + number), f"{number}", max_tokens=9, ignore_eos=True) for number in range(4)
    ]
    alone = [tokens_of(_served(engine(), other), other.request_id) for other in others]
    sick = engine()
    events = _served(sick, picture_request("sick", float("nan"), **asked), *others)
    last = next(event for event in events if event.request.request_id == "sick" and event.finish_reason)
    assert last.finish_reason == "error" and not last.text and not last.logprobs
    assert "NaN or infinite" in last.error and "prefill" in last.error and "position 21" in last.error
    assert [tokens_of(events, other.request_id) for other in others] == alone
    assert sick.metrics.not_finite_logits == 1
    fine = _served(sick, picture_request("fine", 0.5))  # the same text and digest, but nothing of it is shared
    assert fine[-1].cached_tokens == 0
    assert tokens_of(fine, "fine") == tokens_of(_served(engine(), picture_request("fine", 0.5)), "fine")


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("preempted", [False, True])
def test_what_a_prompt_wrote_that_never_samples_hurts_nobody(steps, preempted):
    """Its picture is NaN, and it loses its blocks before anybody has seen its logits."""
    healthy = picture_request("fine", 0.5, max_tokens=12)
    later = [make_request([number] * 7, f"{number}", max_tokens=9, ignore_eos=True) for number in range(6)]
    alone = [tokens_of(_served(tiny_engine(MODEL), other), other.request_id) for other in (healthy, *later)]
    engine = tiny_engine(MODEL, kv_cache_bytes=32 * 1024, max_batched_tokens=8, max_sequences=4)
    engine.submit(sick := picture_request("sick", float("nan")))
    for _ in range(steps):  # of 8 tokens each
        engine.step()
    if preempted:
        engine.scheduler._preempt(engine.scheduler.running[-1])
    engine.cancel(sick.number)
    assert ends(run(engine)) == {"sick": "cancelled"}
    events = _served(engine, healthy, *later)
    assert [tokens_of(events, other.request_id) for other in (healthy, *later)] == alone
    assert engine.metrics.not_finite_logits == 0


def test_a_fault_while_decoding_names_its_position_and_keeps_the_text_so_far():
    engine, runner = make_engine()
    runner.script["r"] = [*b"ab", NOT_FINITE]
    events = _served(engine, make_request([1, 2, 3], max_tokens=9))
    assert tokens_of(events) == [*b"ab"] and ends(events) == {"r": "error"}
    assert "decode" in events[-1].error and "position 4" in events[-1].error


def _served(engine, *requests):
    for request in requests:
        engine.submit(request)
    return run(engine)
