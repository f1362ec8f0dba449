"""Sampling parameters and request validation."""

import json
import math

import numpy as np
import pytest
import torch
from engine_fakes import VOCABULARY, make_engine, make_request

from tessera.engine.sequence import Request, SamplingParameters
from tessera.errors import ConfigError, InvalidRequest
from tessera.prompt.sampling import PENALTIES
from tessera.settings.stages import EngineConfig


def test_defaults_are_greedy_and_as_long_as_fits():
    parameters = SamplingParameters.parse("")
    assert parameters == SamplingParameters.parse(None) == SamplingParameters.parse({}) == SamplingParameters()
    assert (parameters.temperature, parameters.max_tokens) == (0, None)


READ = {
    "max_tokens": ("8", 8),
    "min_tokens": (2.0, 2),
    "temperature": ("0.7", 0.7),
    "top_p": ("0.9", 0.9),
    "top_k": (-1, -1),
    "seed": ("42", 42),
    "stop": ("END", ("END",)),
    "ignore_eos": ("true", True),
    "logprobs": ("3", 3),
    "skip_special_tokens": (False, False),
    "include_stop_str_in_output": (1, True),
    "presence_penalty": ("-2", -2.0),
    "frequency_penalty": (2, 2.0),
    "repetition_penalty": (1.05, 1.05),
    "no_repeat_ngram_size": ("100", 100),
    "priority": (-(2**63), -(2**63)),
    "min_p": ("0.1", 0.1),
    "stop_token_ids": ([3, 9], (3, 9)),
    "logit_bias": ({"5": -100, "7": "1.5"}, ((5, -100.0), (7, 1.5))),
    "draft": ("x" * 65536, "x" * 65536),
    "draft_pool": ("7", "7"),
}


def test_all_names_in_json_and_as_strings():
    found = SamplingParameters.parse(json.dumps({name: given for name, (given, _) in READ.items()}))
    assert {name: (getattr(found, name), type(getattr(found, name))) for name in READ} == {
        name: (expected, type(expected)) for name, (_, expected) in READ.items()
    }
    assert [SamplingParameters.parse({"logprobs": each}).logprobs for each in (True, False, None)] == [0, None, None]


@pytest.mark.parametrize("name", PENALTIES)
def test_each_penalty_counts_as_one(name):
    assert SamplingParameters.parse({name: 2}).penalized
    neutral = {name: getattr(SamplingParameters(), name), "priority": 3, "temperature": 1}
    assert not SamplingParameters.parse(neutral).penalized


def test_choices_are_labels_in_the_order_given():
    harmless = dict(temperature=0, max_tokens=3, top_p=0.5, seed=1, min_tokens=0, stop=[], logprobs=None, priority=2)
    most = [f"{i:0256}" for i in range(64, 0, -1)]
    asked = json.dumps({"choices": most, "repetition_penalty": 1, **harmless})
    assert SamplingParameters.parse(asked).choices == tuple(most)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("yes,no", "must be a list"),
        (["yes", 1], "must be a list"),
        (["yes", ""], "must be a list"),
        ([], "holds 0 labels"),
        (["yes"], "holds 1 labels"),
        ([f"{i}" for i in range(65)], "holds 65 labels"),
        (["yes", "no", "yes"], "holds 'yes' twice"),
        (["yes", "x" * 257], "choices.1. has 257 characters"),
        (["yes", "\ud800"], "choices.1. has a lone surrogate"),
    ],
)
def test_labels_that_are_no_choice(choices, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParameters.parse({"choices": choices})


@pytest.mark.parametrize(
    "other",
    [{"min_p": 0.5}, {"stop_token_ids": [5]}, {"logit_bias": {"5": 1}}, {"draft": "yes"}]
    + [{"temperature": 0.5}, {"stop": "."}, {"min_tokens": 1}, {"ignore_eos": True}, {"logprobs": 0}]
    + [{name: 2} for name in PENALTIES],
)
def test_choices_exclude_what_shapes_free_text(other):
    with pytest.raises(InvalidRequest, match=f"choices and {next(iter(other))} exclude each other"):
        SamplingParameters.parse({"choices": ["yes", "no"], **other})


LARGE = 2**63
WRONG = {
    "max_tokens": [0, "many", 1.5, True, LARGE],
    "min_tokens": [-1, LARGE],
    "temperature": [-0.1, math.nan],
    "top_p": [0, 1.1],
    "top_k": [-2, LARGE],
    "seed": [2 * LARGE, LARGE],
    "stop": ["", [1], ["a"] * 17],
    "logprobs": [21],
    "ignore_eos": ["maybe", [True]],
    "presence_penalty": [2.1, "much"],
    "frequency_penalty": [-2.1, math.nan],
    "repetition_penalty": [0, 10.1, True],
    "no_repeat_ngram_size": [-1, 2.5, LARGE, float(LARGE)],
    "priority": [0.5, LARGE],
    "min_p": [-0.1, 1.1],
    "stop_token_ids": [5, ["5"], [-1], [True], [1] * 65],
    "logit_bias": [
        [[5, 1]],
        *({"5": bias} for bias in (100.5, True, None)),
        *({token: 1} for token in ("-5", "five", "9" * 30)),
        {"5": 1, "05": 2},
        {str(token): 1 for token in range(1025)},
    ],
    "draft": [7, ["a"], "x" * 65537, "\ud800"],
    "draft_pool": [7, "x" * 129],
    "beam_width": [2],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_name_their_key(name, value):
    with pytest.raises(InvalidRequest, match=name):
        SamplingParameters.parse({name: value})


@pytest.mark.parametrize("asked", [{"logit_bias": {str(VOCABULARY): 1}}, {"stop_token_ids": [1, VOCABULARY]}])
def test_a_token_that_the_model_does_not_know_is_refused(asked):
    name = next(iter(asked))
    with pytest.raises(
        InvalidRequest, match=f"{name} holds the token {VOCABULARY}; the model knows 0..{VOCABULARY - 1}"
    ):
        make_engine()[0].submit(make_request([1, 2], **asked))


@pytest.mark.parametrize("given", ["{", "[]", "3", '{"max_tokens": 2, "min_tokens": 3}'])
def test_malformed_parameters(given):
    with pytest.raises(InvalidRequest, match="sampling_parameters"):
        SamplingParameters.parse(given)


def request(ids=(1, 2, 3, 4), spans=((1, 2),), rows=(2, 1), digest=2, positions=None):
    embeddings = None if rows is None else torch.zeros(rows)
    spans = np.array(spans, np.int32).reshape(-1, 2)
    return Request("r", np.array(ids), spans, embeddings, np.zeros(digest, np.int64), positions=positions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ids=()), "input_ids"),
        (dict(ids=((1, 2), (3, 4))), "input_ids"),
        (dict(ids=(1, 2, 3, VOCABULARY)), "input_ids.3."),
        (dict(ids=(-1, 2, 3, 4)), "input_ids.0."),
        (dict(spans=((3, 2),)), "spans"),
        (dict(spans=((-1, 2),)), "spans"),
        (dict(spans=((1, 0),), rows=(0, 1)), "spans"),
        (dict(spans=((0, 2), (1, 2)), rows=(4, 1), digest=4), "spans"),
        (dict(rows=(3, 1)), "embeddings"),
        (dict(rows=(2, 5)), "embeddings"),
        (dict(rows=None), "embeddings"),
        (dict(spans=(), digest=0), "embeddings"),
        (dict(digest=0), "digest"),
        (dict(positions=np.zeros((3, 3), int)), "positions"),
        (dict(positions=np.zeros((3, 4), int)), r"positions must be \[1, 4\]"),
        (dict(positions=np.zeros(4, int)), "positions"),
        (dict(positions=np.full((1, 4), -1)), "positions"),
    ],
)
def test_parts_that_do_not_fit(changes, message):
    request(ids=(1, -1, 10**6, 4)).validate(VOCABULARY, 1)  # ids under pictures do not matter
    with pytest.raises(InvalidRequest, match=message):
        request(**changes).validate(VOCABULARY, 1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(block_size=0),
        dict(max_model_len=1),
        dict(kv_cache_bytes=-1),
        dict(max_sequences=64, max_batched_tokens=64),
        dict(dtype="int8"),
        dict(prefix_cache="always"),
        dict(weights="none"),
    ],
)
def test_contradictory_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)
