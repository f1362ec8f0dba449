"""The default checkpoint gives `transformers`' tokens; `make bench NAME=parity` shows the same on 200 pictures."""

from bench.parity import Ours, Theirs

import scene
from tessera.preprocess.preprocessor import PreprocessRequest


def test_greedy_tokens_are_equal_on_identical_pixels():
    ours, theirs = Ours.load(), Theirs()
    for seed, question in ((7, "Is there an exposed wire?"), (11, "How many sockets are there?")):
        jpeg = scene.encode_jpeg(scene.sample(seed, "heldout"))
        prepared, tokens = ours.tokens(PreprocessRequest(text=question, images=[jpeg]))
        assert tokens == theirs.answered(theirs.from_prepared(prepared)), question
