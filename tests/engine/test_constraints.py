"""Answers that must match a regular expression or a JSON schema: what is allowed, what comes out."""

import random
import re
from itertools import pairwise

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    VOCABULARY,
    ByteTokenizer,
    ends,
    make_engine,
    make_request,
    run,
    text_of,
    tiny_engine,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from tessera.engine.structured_output import constraints as constraints_module
from tessera.engine.structured_output.constraints import Constraints, Matcher
from tessera.engine.structured_output.sequences import ConstrainedSequence, MaskLane
from tessera.errors import InvalidRequest
from tessera.prompt import grammar
from tessera.prompt.sampling import SamplingParameters


def matcher(tokenizer=None, vocab_size=VOCABULARY, stop_ids=(EOS,), **parameters):
    constraints = Constraints(tokenizer or ByteTokenizer(), vocab_size, stop_ids)
    return constraints.matcher(SamplingParameters.parse(parameters))


def allowed(mask):
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def test_a_tokenizer_that_writes_tokens_beyond_the_model():
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text, special: [5000 + ord(character) for character in text]
    assert allowed(matcher(tokenizer, regex="abc(d|e)").mask) == {ord("a")}


def test_masks_follow_the_answer_and_hold_every_stop_token_at_its_end():
    one = matcher(stop_ids=(EOS, 10, 299), regex=r"no\n?|not")
    assert len(one.mask) == -(-VOCABULARY // 8) and allowed(one.mask) == {ord("n")}
    one.advance(ord("n"))
    one.advance(ord("o"))
    other = one.copy()
    assert allowed(one.mask) == {ord("t"), EOS, 10, 299}  # 10, a stop token, does not stand for the line break
    assert allowed(one.going_on(one.mask)) == {ord("t")}
    one.advance(ord("t"))
    assert allowed(one.mask) == allowed(one.going_on(one.mask)) == {EOS, 10, 299}
    assert allowed(other.mask) == {ord("t"), EOS, 10, 299} and one.error is other.error is None


class Pieces(ByteTokenizer):
    """A few pieces in place of the bytes; 0 is the special token <eos>, 1 another one."""

    special_ids = frozenset([0, 1])

    def __init__(self, *pieces, strips_space=False):
        self._pieces = [b"", b"yes", *pieces]
        self.strips_space = strips_space

    def token_bytes(self, token):
        return self._pieces[token] if token < len(self._pieces) else b""

    def encode(self, text, special):
        return []


def test_no_special_token_spells_text_and_equal_pieces_are_all_allowed():
    tokenizer = Pieces(b"yes", b"y", b"es", b"yes", b"no")
    assert allowed(matcher(tokenizer, 10, (0,), regex="yes|no").mask) == {2, 3, 5, 6}


def test_a_space_that_the_tokenizer_takes_off_does_not_begin_an_answer():
    tokenizer = Pieces(b"a", b" a", b" ", strips_space=True)
    assert allowed(matcher(tokenizer, 5, (0,), regex=" ?a a").mask) == {2}
    with pytest.raises(InvalidRequest, match="it begins with a space, which"):
        matcher(tokenizer, 5, (0,), regex=" a")
    assert allowed(matcher(Pieces(b"a", b" a", b" "), 5, (0,), regex=" ?[ab] a").mask) == {2, 3, 4}


def test_a_checkpoint_without_stop_tokens_cannot_end():
    with pytest.raises(InvalidRequest, match="json_object needs a checkpoint that names the token"):
        matcher(stop_ids=(), json_object=True)


def test_what_was_compiled_is_kept_up_to_so_many_bytes(monkeypatch):
    monkeypatch.setattr(constraints_module, "MOST_COMPILED_BYTES", 10 << 20)
    compiled = []
    compile_ = grammar.compiled
    monkeypatch.setattr(grammar, "compiled", lambda *asked: compiled.append(asked) or compile_(*asked))
    read = []
    read_ = grammar.grammar
    monkeypatch.setattr(grammar, "grammar", lambda asked: read.append(asked) or read_(asked))
    constraints = Constraints(ByteTokenizer(), VOCABULARY, (EOS,))
    for n in (*range(9), 0, 9, 0, 1):  # of one MiB each, and a little for the computing
        constraints.matcher(SamplingParameters.parse({"regex": f"a{n}"}))
    assert len(read) == len(compiled) == 9 + 2  # 1 was the one not used for longest
    constraints.compile(SamplingParameters.parse({"regex": "b"}), 9 << 20)
    assert constraints.has(SamplingParameters.parse({"regex": "b"}))
    assert not constraints.has(SamplingParameters.parse({"regex": "a1"}))


def test_what_others_wrote_ends_no_answer(monkeypatch):
    """Answers of one text share a lexer, and with it the library's limits, here narrow ones."""

    def narrow(parameters, vocabulary):
        return LLMatcher(
            vocabulary, grammar.grammar(parameters), log_level=0, limits=LLParserLimits(max_lexer_states=300)
        )

    def follow(seed):
        one, dice = constraints.matcher(parameters), random.Random(seed)
        for _ in range(60):
            if one.error is None:
                one.advance(dice.choice(b"ab"))
                assert one.mask.any() or one.error
        return one.error

    monkeypatch.setattr(grammar, "compiled", narrow)
    constraints = Constraints(ByteTokenizer(), VOCABULARY, (EOS,))
    parameters = SamplingParameters.parse({"regex": "[ab]*a[ab]{20}"})
    errors = [follow(seed) for seed in range(12)]
    assert errors[0] is None and any(errors)  # one may meet the limit, no two in a row
    assert not any(one and other for one, other in pairwise(errors))
    monkeypatch.setattr(constraints_module, "MOST_COPIES", 2)
    constraints = Constraints(ByteTokenizer(), VOCABULARY, (EOS,))
    assert [follow(seed) for seed in range(12)] == [None] * 12


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_penalties_rule_out_only_what_the_form_can_spare(model, temperature):
    """An n-gram that the form repeats is written again; one that it need not repeat is not."""
    for regex in ("(ab){6}", "[a-c]{3}x{4}"):
        engine = tiny_engine(model, eos=(EOS,))
        sampling = dict(temperature=temperature, no_repeat_ngram_size=1, repetition_penalty=2.0, frequency_penalty=1.0)
        engine.submit(make_request([1, 2, 3], max_tokens=30, seed=1, regex=regex, **sampling))
        events = run(engine)
        assert re.fullmatch(regex, text_of(events)) and ends(events) == {"r": "stop"}
    assert sorted(text_of(events)[:3]) == ["a", "b", "c"]


def answer(regex="a{3,9}", tokens=range(VOCABULARY), **sampling):
    engine, _ = make_engine(tokens=tokens)
    engine.submit(make_request([1, 2], **{"max_tokens": 30, "regex": regex, **sampling}))
    events = run(engine)
    return text_of(events), events[-1]


def test_how_answers_end():
    eager = [ord("a"), EOS]
    text, last = answer(tokens=eager)
    assert re.fullmatch("a{3,9}", text) and (last.finish_reason, last.usage.completion_tokens) == (
        "stop",
        len(text) + 1,
    )
    assert answer(max_tokens=2)[0] == "aa" and answer(max_tokens=2)[1].finish_reason == "length"
    assert answer(tokens=eager, min_tokens=8)[0] in ("a" * 8, "a" * 9)
    assert answer(min_tokens=20)[0] == "a" * 9  # complete, though min_tokens is not reached
    text, last = answer("aaab{5}", stop="b")
    assert (text, last.finish_reason) == ("aaa", "stop")
    assert answer("aaab{5}", stop="bb", include_stop_str_in_output=True)[0] == "aaabb"
    text, last = answer(logprobs=0, skip_special_tokens=False)
    assert re.fullmatch("a{3,9}", text)


@pytest.mark.parametrize("async_launch", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("most_beyond", [60.0, -1.0])
def test_an_answer_that_cannot_go_on_ends_with_the_reason(monkeypatch, most_beyond, drafts, async_launch):
    """As one that becomes too complex does, behind all that must come before; also where a slow grammar's fault is
    found beside the steps."""
    monkeypatch.setattr(constraints_module, "_MOST_BEYOND_S", most_beyond)
    engine, _ = make_engine(drafts=drafts, async_launch=async_launch)
    engine._tokenizer.token_bytes = lambda token: bytes([token]) if token < 256 and token != ord("x") else b""
    engine._tokenizer.encode = lambda text, special: []
    for form in ("(a|b)[x]", "(a|b)cd[x]"):
        name = engine.submit(make_request([1, 2], form, regex=form)).request.request_id
        engine.submit(make_request([1, 2], "other", max_tokens=3, ignore_eos=True))
        events = run(engine)
        last = next(event for event in events if event.request.request_id == name and event.finish_reason)
        assert last.finish_reason == "error" and last.error == "regex: no token of the vocabulary can come next"
        assert text_of(events, name)[1:] == form.removesuffix("[x]")[5:]
    assert engine.metrics.finished == {"error": 2, "length": 2} and engine.metrics.not_finite_logits == 0


@pytest.mark.parametrize("async_launch", [False, True])
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_grammar_found_slow_while_a_step_is_launched_holds_it_up_no_more(monkeypatch, drafts, async_launch):
    """The places whose masks are missing are run once more, and nothing else changes."""

    def answers():
        engine, runner = make_engine(num_blocks=200, drafts=drafts, async_launch=async_launch)
        for n in range(6):
            engine.submit(make_request([n], f"{n}", max_tokens=60, regex="((ab|cd)[0-9]xyz){4}"))
        events = run(engine, 20_000)
        spans = [(sequence, end) for batch in runner.batches for sequence, _, end, samples in batch if samples]
        return [text_of(events, f"{n}") for n in range(6)], len(spans) - len(set(spans))

    def computed(known, seconds):
        """Every fifth mask is slow, and then the next three."""
        known.seconds += 1
        known.slow_for = known.slow_for - 1 if known.slow_for else 3 * (known.seconds % 5 == 0)

    expected, again = answers()
    assert not again
    monkeypatch.setattr(constraints_module._Grammar, "computed", computed)
    found, again = answers()
    assert found == expected and again


@pytest.mark.parametrize("drafts", [0, 15])
def test_a_token_that_did_not_count_is_penalized_as_none(monkeypatch, drafts):
    """Where a grammar is found slow before a mask of the step is made; n-grams know all that was said."""
    model, asked = tiny_model(), dict(max_tokens=40, regex="(ab|cd)x[a-c]{12}", no_repeat_ngram_size=2)

    def answer(number, slow):
        engine = tiny_engine(model, eos=(EOS,), drafts=drafts)
        launch, found = engine._runner.launch, []

        def launched(batch):
            for each in batch.sampling if slow and not found else ():
                if each.outputs and each._matcher._mask is None:
                    found.append(each)
                    each._matcher._grammar.slow_for = 2  # as by another answer's mask
            return launch(batch)

        monkeypatch.setattr(engine._runner, "launch", launched)
        engine.submit(make_request([*b"xaxa", 20 + number, *b"xb", 90 + number], **asked))
        return text_of(run(engine, 5000)), bool(found)

    for number in range(8):
        expected, _ = answer(number, slow=False)
        assert answer(number, slow=True) == (expected, True)


@pytest.mark.parametrize("drafts", [0, 5])
def test_masks_are_made_while_the_device_computes_what_they_are_for(monkeypatch, drafts):
    engine, runner = make_engine(drafts=drafts, async_launch=True)
    launch, make, launching, made = runner.launch, Matcher._make, [False], []

    def launched(batch):
        launching[0] = True  # the runner's own launches the layers before it asks for any mask
        result = launch(batch)
        launching[0] = False
        return result

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(Matcher, "_make", lambda *given: [make(*given), made.append(launching[0])])
    for n in range(3):
        engine.submit(make_request([n], f"{n}", max_tokens=60, regex="((ab|cd)[0-9]xyz){4}"))
    run(engine)
    assert made and all(made)


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "yes", "[0-9]", "é", r"\.", " ", "[^a-z]", r"\s"]),
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}){{1,3}}".format, inner),
        st.builds("(?:{})?".format, inner),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def hot_answers(model, sampling, count=4):
    """What a model of random weights answers, as wild as can be; only those that came to their end."""
    engine = tiny_engine(model, eos=(EOS,))
    for n in range(count):
        engine.submit(make_request([n, 7, 9], f"{n}", temperature=1.5, seed=n, max_tokens=150, **sampling))
    events = run(engine)
    found = ends(events)
    assert set(found.values()) <= {"stop", "length"}
    return [text_of(events, name) for name, reason in found.items() if reason == "stop"]


@settings(max_examples=40)
@given(expression=EXPRESSIONS)
def test_every_finished_answer_matches_its_expression(model, expression):
    answers = hot_answers(model, {"regex": expression})
    assert answers
    for text in answers:
        assert re.fullmatch(expression, text), text


def test_a_token_of_the_clients_ends_a_constrained_answer_after_min_tokens():
    asked = dict(max_tokens=8, ignore_eos=False, min_tokens=2, regex="[ab]{5}", stop_token_ids=[ord("b")])
    sequence = ConstrainedSequence(make_request([1], **asked), matcher(regex="[ab]{5}"), MaskLane(1), stop_ids=(EOS,))
    reasons = []
    for token in b"bab":
        assert ord("b") in allowed(sequence.mask())
        sequence.in_flight = 1
        sequence.take([(token, None)])
        sequence.in_flight = 0
        reasons.append(sequence.finish_reason)
    assert reasons == [None, None, "stop"]


@pytest.mark.parametrize(("turns", "kind"), [(2, {}), (3, {"crowded": True}), (1, {"crowded": True, "slow": True})])
def test_how_often_an_answer_runs_by_where_its_masks_are_made(monkeypatch, turns, kind):
    for name, value in ({"crowded": False, "slow": False} | kind).items():
        monkeypatch.setattr(Matcher, name, value)
    sequence = ConstrainedSequence(make_request([1], regex="a{5}", max_tokens=8), matcher(regex="a{5}"), MaskLane(1))
    assert sequence.turns == turns


def test_no_more_of_a_draft_is_verified_than_a_step_has_time_to_make_masks_for():
    one, other = (matcher(regex="[ab]{20}") for _ in range(2))
    draft = [ord("a")] * 15
    for mean, most in ((0.00001, 15), (0.0005, 4), (0.003, 0)):
        one._grammar.mean = mean
        assert len(one.along(draft)) == most
    one._grammar.mean = 0.0005
    one._beside.followed.update((one, other))
    assert len(one.along(draft)) == 2


def test_of_a_text_that_must_come_only_the_beginning_is_spelled():
    """llguidance asks for all of it at each mask: 20,000 characters of a{20000}, by the model's tokenizer."""
    asked = []

    def encode(text):
        asked.append(text)
        return [0 if character == "a" else 1 for character in text]

    spelling = grammar.Spelling([b"a", "é".encode(), b""], 2, encode)
    assert spelling(b"a" * 20_000) == [0] * 256
    assert spelling("a" * 255 + "é" * 9) == [0] * 255  # no character is cut in two
    assert spelling("é" * 4) == [1] * 4 and list(map(len, asked)) == [256, 255, 4]
    assert spelling(b"a" * 10_000) == [0] * 256 and len(asked) == 3  # which is what most of such a mask takes
