"""The default checkpoint gives `transformers`' tokens; `make bench NAME=parity` shows the same on 200 pictures."""

from __future__ import annotations

from bench.parity import Ours, Theirs, pictures

from tessera.preprocess.preprocessor import PreprocessRequest


def test_greedy_tokens_are_equal_on_identical_pixels():
    ours, theirs, work = Ours.load(), Theirs(), pictures(2)
    for jpeg, question in work:
        prepared, tokens = ours.tokens(PreprocessRequest(text=question, images=[jpeg]))
        assert tokens == theirs.answered(theirs.from_prepared(prepared)), question
