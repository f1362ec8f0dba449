"""The default checkpoint gives `transformers`' tokens; `make bench NAME=parity` shows the same on 200 pictures."""

from __future__ import annotations

import pytest
from bench.parity import Ours, Theirs, pictures

from tessera.preprocess.preprocessor import PreprocessRequest


@pytest.fixture(scope="module")
def both():
    return Ours.load(), Theirs(), pictures(3)


def test_greedy_tokens_are_equal_on_identical_pixels(both):
    ours, theirs, work = both
    for jpeg, question in work:
        prepared, tokens = ours.tokens(PreprocessRequest(text=question, images=[jpeg]))
        assert tokens == theirs.answered(theirs.from_prepared(prepared)), question


def test_both_processors_make_the_same_prompt_and_nearly_the_same_pixels(both):
    ours, theirs, work = both
    for jpeg, question in work:
        prepared = ours.preprocessor(PreprocessRequest(text=question, images=[jpeg]))
        mine, other = theirs.from_prepared(prepared), theirs.inputs([jpeg], [question])
        assert mine["input_ids"].tolist() == other["input_ids"].tolist()
        # One grey level is 1/255 / 0.225 of normalised pixel.
        difference = (mine["pixel_values"] - other["pixel_values"]).abs() * 0.225 * 255
        assert difference.mean() <= 0.2
