"""Which token is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from engine_fakes import make_request
from transformers import MinPLogitsWarper, SequenceBiasLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from tessera.engine.execution.sampler import SamplingRow, sample, uniform
from tessera.engine.sequence import SamplingParameters, Sequence
from tessera.kernels.transfer import Moment

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5]).log_softmax(0)


def row(seed=0, place=0, forbidden=(), **parameters):
    return SamplingRow(SamplingParameters.parse(parameters), seed, place, frozenset(forbidden))


def tokens(logits, rows):
    return sample(logits, rows, Moment(logits.device)).tokens()


def draw(count=4000, **parameters):
    """Relative frequencies over many places of one answer."""
    rows = [row(7, place, **parameters) for place in range(count)]
    drawn = torch.tensor([token for token, _ in tokens(LOGITS.repeat(count, 1), rows)])
    return drawn.bincount(minlength=5) / count


FIRST_OF_TWO = float(LOGITS[[1, 4]].softmax(0)[0])


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [
        *((temperature, 0, 0, 1) for temperature in (0.5, 1.0, 2.0)),
        *((temperature, 0.2, 0, 1) for temperature in (0.5, 1.0, 2.0)),
        (1, 1.0, 0, 1),
        (1, 0, 2, 1),
        *((1, 0, 0, p) for p in (0.01, float(LOGITS[1].exp()) + 0.01)),
        *((1, 0, top_k, FIRST_OF_TWO - 0.01) for top_k in (2, 5)),  # top_p applies within top_k
    ],
)
def test_frequencies_are_those_of_transformers_warpers(temperature, min_p, top_k, top_p):
    warped = LOGITS[None] / temperature
    for warper, value in ((MinPLogitsWarper, min_p), (TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p % 1)):
        warped = warper(value)(None, warped) if value else warped
    drawn = draw(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    assert ((drawn > 0) == warped[0].isfinite()).all()
    torch.testing.assert_close(drawn, warped[0].softmax(0), atol=0.03, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_as_transformers_adds_them(dtype):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    biases = [{}, {"7": 100}, {str(token): -100 for token in range(45)}, {"3": 0.123, "4": -0.1}, {}, {"49": 5}]
    expected = [
        SequenceBiasLogitsProcessor({(int(token),): float(bias) for token, bias in each.items()})(
            torch.zeros((1, 0), dtype=torch.int64), line.float()[None]
        )[0]
        if each
        else line.float()
        for each, line in zip(biases, logits)
    ]
    rows = [row(logit_bias=bias, logprobs=1 if number % 2 else None) for number, bias in enumerate(biases)]
    found = tokens(logits.clone(), rows)
    assert [token for token, _ in found] == [int(scores.argmax()) for scores in expected] and found[1][0] == 7
    assert found[1][1].logprob == pytest.approx(float(logits[1].float().log_softmax(0)[7]))  # the model's own


def test_seeds_and_places_differ():
    logits = torch.zeros(1, 1000)
    chosen = {tokens(logits, [row(seed, place, temperature=1)])[0][0] for seed in range(5) for place in range(5)}
    assert len(chosen) > 20
    assert uniform(7, 3) == 0.32541466495141846  # a seed stays worth the same in later versions
    values = [uniform(seed, 0) for seed in range(-500, 500)]
    assert 0.45 < sum(values) / 1000 < 0.55 and min(values) >= 0 and max(values) < 1


def test_tiny_temperature_is_greedy_without_overflow():
    assert tokens(LOGITS[None] * 1e4, [row(temperature=1e-30)]) == [(1, None)]


def test_logprobs_describe_the_model_not_the_sampling():
    rows = [row(temperature=0.1, top_k=1, logprobs=2, forbidden=[1])]
    ((chosen, report),) = tokens(LOGITS[None].clone() + 3, rows)
    assert chosen == 4
    assert math.isclose(report.logprob, float(LOGITS[4]), abs_tol=1e-5)
    assert [token for token, _ in report.top] == [1, 4]
    assert math.isclose(report.top[0][1], float(LOGITS[1]), abs_tol=1e-5)


def test_logprobs_only_where_asked():
    rows = [row(), row(logprobs=0), row(logprobs=3)]
    none, own, three = (report for _, report in tokens(LOGITS.repeat(3, 1), rows))
    assert (none, own.top, len(three.top)) == (None, (), 3)
    assert own.logprob == three.logprob == pytest.approx(float(LOGITS[1]))


@pytest.mark.parametrize(
    ("asked", "plain"),
    [
        ({}, True),
        ({"min_tokens": 2, "ignore_eos": True, "stop": ["."]}, True),
        ({"temperature": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"logit_bias": {"3": 1}}, False),
        ({"min_p": 0.5, "stop_token_ids": [3]}, True),
        ({"choices": ["a", "b"]}, False),
        ({"json_object": True}, False),
    ],
)
def test_what_needs_more_than_the_likeliest_token(asked, plain):
    sequence = Sequence(make_request([1], max_tokens=8, **asked), stop_ids=(1,))
    sequence.in_flight = 1
    assert sequence.plain is plain
