"""Label scoring against a brute-force oracle and by hand."""

import math
import random
from array import array
from pathlib import Path

import pytest
from engine_fakes import EOS, ByteTokenizer, make_request, run, tiny_engine, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.engine.scheduling.scheduler import ScheduledBatch, ScheduledSpan
from tessera.engine.sequence import Sequence
from tessera.engine.structured_output.labels import IMPOSSIBLE, LabelScorer, label_token_ids
from tessera.errors import InvalidRequest

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
ORDINARY, ENDS = 3, (3, 4)  # tokens 0, 1, 2 are words, 3 and 4 end an answer, 5 is one that no label has
VOCABULARY = 6
LABELS = st.lists(
    st.lists(st.integers(0, ORDINARY - 1), min_size=1, max_size=5), min_size=2, max_size=9, unique_by=tuple
)


def language_model(seed):
    """Log probabilities of the whole vocabulary after a path; the same for the same path."""

    def after(path):
        dice = random.Random(f"{seed} {tuple(path)}")
        logits = [dice.gauss(0, 3) for _ in range(VOCABULARY)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return after


def labelled(labels, token_ids, ends):
    """A scorer of labels that have these tokens."""
    return LabelScorer(labels, lambda text: dict(zip(labels, token_ids)).get(text.strip("\n"), []), ends)


def scored(token_ids, after, ends=ENDS):
    """The scorer once all is known, and the branches it asked for."""
    scorer, branches = labelled([str(ids) for ids in token_ids], token_ids, ends), []
    while not scorer.done:
        branches.append(scorer.branch)
        row = after(scorer.branch.path)
        scorer.observe([row[token] for token in scorer.branch.children])
    assert scorer.branch is None
    return scorer, branches


def oracle(token_ids, after):
    """Each label's (log probability, decisions), token by token against all the other labels."""
    found = []
    for label in token_ids:
        logprob, decisions = 0.0, 0
        for place in range(len(label) + 1):
            path = label[:place]
            others = [other for other in token_ids if other != label and other[:place] == path]
            token = label[place] if place < len(label) else None
            if any(place == len(other) or other[place] != token for other in others):
                row = after(path)
                ways = ENDS if token is None else [token]
                logprob += math.log(sum(math.exp(row[way]) for way in ways))
                decisions += 1
        found.append((logprob, decisions))
    return found


@settings(max_examples=300)
@given(LABELS, st.integers(0, 2**32))
def test_scores_are_those_of_the_oracle(token_ids, seed):
    after = language_model(seed)
    scorer, _ = scored(token_ids, after)
    (best, tokens, scores), expected = scorer.answer(), oracle(token_ids, after)
    assert [score["logprob"] for score in scores] == pytest.approx([logprob for logprob, _ in expected])
    assert [score["probability"] for score in scores] == pytest.approx([math.exp(logprob) for logprob, _ in expected])
    assert sum(score["probability"] for score in scores) <= 1 + 1e-9
    means = [math.exp(logprob / decisions) for logprob, decisions in expected]
    assert [score["normalized"] for score in scores] == pytest.approx([mean / sum(means) for mean in means])
    likeliest = max(range(len(scores)), key=lambda place: expected[place][0])
    assert (best, tokens) == (scores[likeliest]["label"], tuple(token_ids[likeliest]))
    assert [score["label"] for score in scores] == [str(ids) for ids in token_ids]


def test_the_first_of_equals_is_the_best():
    for ids in ([[0], [1]], [[1], [0]]):
        assert scored(ids, lambda path: [-1.0] * VOCABULARY)[0].answer().best == str(ids[0])


@pytest.mark.parametrize("odd", [-math.inf, math.nan])
def test_what_the_model_rules_out_stays_a_number(odd):
    scorer, _ = scored([[0], [1]], lambda path: [odd, odd])
    assert [score["logprob"] for score in scorer.answer().scores] == [IMPOSSIBLE] * 2
    assert [score["normalized"] for score in scorer.answer().scores] == [0.5] * 2
    without_stop, _ = scored([[0], [0, 1]], lambda path: [-0.5, -0.5], ends=())
    assert [score["probability"] for score in without_stop.answer().scores] == [0, pytest.approx(math.exp(-0.5))]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([[0, 1], [0, 1]], "'first' and 'second' have the same tokens"),
        ([[0], []], "'second' has no tokens"),
        ([[0], [1, 3]], "'second' holds a token that ends an answer"),
    ],
)
def test_labels_that_cannot_be_told_apart(token_ids, message):
    with pytest.raises(InvalidRequest, match=message):
        labelled(["first", "second"], token_ids, ENDS)


def test_labels_are_tokenized_as_an_answer_begins():
    """The model writes after a line break, where no tokenizer puts a space before the first word."""

    def llama(text):  # a space in front of the whole text
        return [ord(character) for character in ("▁" + text)]

    assert label_token_ids("yes", llama) == [ord(character) for character in "yes"]

    def merging(text):  # the line break and what follows become one token
        return [sum(map(ord, text))]

    assert label_token_ids("yes", merging) == merging("yes")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_branch_is_read_on_its_own_tokens(ahead):
    """Not on what the step before found likeliest, though each branch is a token longer than the one before."""
    prompt, choices = [7, 8, 9], ["ab", "acd", "acee", "acef", "x"]
    engine = tiny_engine(tiny_model(), eos=(EOS,))
    engine._runner.async_launch = ahead
    found = engine.submit(make_request(prompt, choices=choices))
    run(engine)
    scorer = LabelScorer(choices, lambda text: ByteTokenizer().encode(text, False), (EOS,))
    while not scorer.done:
        path, children = scorer.branch.path, scorer.branch.children
        alone = Sequence(make_request([*prompt, *path], max_tokens=1))
        alone.block_table = array("q", range(3))
        logits = engine._runner.logits(ScheduledBatch([ScheduledSpan(alone, 0, alone.prompt_length, 1)]))[0]
        scorer.observe(logits.log_softmax(0)[list(children)].tolist())
    for score, expected in zip(found.labels.scores, scorer.answer().scores):
        assert score["logprob"] == pytest.approx(expected["logprob"], abs=1e-4)
