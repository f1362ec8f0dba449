"""Several tokens of an answer in one step: whatever is drafted, the answer is the one without drafts."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import (
    EOS,
    VOCABULARY,
    ByteTokenizer,
    Guess,
    Known,
    draft,
    ends,
    make_engine,
    make_request,
    run,
    text_of,
    tiny_engine,
    tiny_model,
    tokens_of,
)
from test_random_mixes import BLOCK, ROWS, STOP, chosen

from tessera.engine.drafts.drafter import Drafting, Expected, Proposal
from tessera.engine.execution import penalties
from tessera.engine.scheduling import scheduler as scheduling
from tessera.engine.scheduling.draft_lengths import draft_lengths, tokens_should_be_known
from tessera.engine.scheduling.policies import TILE, CostModel, Load, StepBudget
from tessera.engine.scheduling.scheduler import ASK_EVERY, ScheduledBatch
from tessera.engine.sequence import NOT_FINITE, Report, Sequence
from tessera.engine.structured_output.constraints import Constraints
from tessera.prompt.sampling import SamplingParameters

MODEL = tiny_model()
PENALTIES = dict(repetition_penalty=0.7, frequency_penalty=0.3, presence_penalty=-0.4, no_repeat_ngram_size=3)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["alpha", "beta", "beton"]}, "open": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["kind", "open", "n"],
    "additionalProperties": False,
}
ASKED = {
    "greedy": dict(),
    "drawn": dict(temperature=1.2, seed=3, top_p=0.9),
    "log probabilities": dict(temperature=0.8, seed=4, logprobs=2),
    "penalties": dict(PENALTIES),
    "drawn under penalties": dict(temperature=1.5, seed=5, logprobs=0, **PENALTIES),
    "n-grams alone": dict(no_repeat_ngram_size=2),
    "min_tokens": dict(min_tokens=9, ignore_eos=False),
    "tokens that end": dict(stop_token_ids=list(range(0, 250, 9)), min_tokens=3),
    "biases": dict(logit_bias={str(token): 3.0 for token in range(40, 60)}),
    "a string that ends": dict(stop=["a", "Q"], min_tokens=2),
    "expression": dict(regex="([a-f]{2,5}-){3}[0-9]{4}", temperature=1.5, seed=6, ignore_eos=False, max_tokens=40),
    "schema": dict(json_schema=SCHEMA, temperature=1.0, seed=7, ignore_eos=False, max_tokens=70, min_tokens=4),
    "schema under penalties": dict(json_schema=SCHEMA, ignore_eos=False, max_tokens=70, logprobs=1, **PENALTIES),
}


def made(**sampling):
    wishes = dict(max_tokens=24, ignore_eos=True) | sampling
    requests = [make_request([7, 8, 9] * 4 + [20 + n] * (1 + 3 * n), f"{n}", **wishes) for n in range(4)]
    picture = make_request([7, 8, 9] * 6, "picture", [(4, 12, 1)], **wishes)
    return [*requests, replace(picture, embeddings=ROWS[1])]


def served(engine, requests):
    """Text, tokens, log probabilities and reason of each."""
    for request in requests:
        engine.submit(request)
    events = run(engine, 5000)
    assert engine.scheduler.blocks.used == 0
    found = {}
    for request in requests:
        name = request.request_id
        rows = [row for e in events if e.request.request_id == name for row in e.logprobs or []]
        found[name] = (text_of(events, name), tokens_of(events, name), rows, ends(events)[name])
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, (text, tokens, rows, reason) in expected.items():
        assert found[name][:2] == (text, tokens) and found[name][3] == reason, name
        assert [row["token_id"] for row in found[name][2]] == [row["token_id"] for row in rows]
        values = [[row["logprob"], *[each["logprob"] for each in row["top"]]] for row in rows]
        for got, wanted in zip(found[name][2], values):
            assert [got["logprob"], *[each["logprob"] for each in got["top"]]] == pytest.approx(wanted, abs=1e-4)


def guesses(expected, wrong):
    """What was answered, as tokens that the engine sampled; a token that ended it is among them."""
    return lambda request: [Guess(expected[request.request_id][1], wrong)]


@pytest.mark.parametrize("wrong", [0, 1, 3], ids=["right", "wrong", "partly right"])
@pytest.mark.parametrize("asked", ASKED)
def test_answers_are_those_without_drafts(monkeypatch, asked, wrong):
    monkeypatch.setattr(penalties, "_LEAST_WIDTH", 1)  # tokens said are given more room with every power of two
    stops = (EOS,) if "json_schema" in ASKED[asked] else STOP  # which holds letters
    plain = tiny_engine(MODEL, eos=stops)
    expected = served(plain, made(**ASKED[asked]))
    engine = tiny_engine(MODEL, eos=stops, drafts=5)
    draft(engine, guesses(expected, wrong))
    same(served(engine, made(**ASKED[asked])), expected)
    metrics = engine.metrics
    assert metrics.drafted_steps > 0 and metrics.drafted_tokens > 0
    forms = "json_schema" in ASKED[asked] or "regex" in ASKED[asked]
    if wrong == 0:
        assert metrics.steps < plain.metrics.steps / 2
    elif wrong == 1 and not forms:
        assert metrics.accepted_tokens == 0
    if "stop" not in ASKED[asked]:  # behind such a string some more are sampled before it is found
        assert metrics.generated_tokens == plain.metrics.generated_tokens


@pytest.mark.parametrize("seed", range(10))
def test_many_kinds_in_small_pools(seed):
    """Preempted, cancelled, of several priorities, planned ahead or not."""
    dice = random.Random(seed)
    stops, form = [(STOP, dict(regex="([a-f]{2,5}-){3}[0-9]{4}")), ((EOS,), dict(json_schema=SCHEMA))][seed % 2]
    requests = []
    for number in range(12):
        wishes = chosen(dice) | dict(seed=number)
        if number in (3, 7):
            wishes = dict(max_tokens=60, temperature=1.0, seed=number, priority=number - 5) | form
        ids = [7, 8, 9] * 6 + [number + 20, 30 - number] * (1 + 3 * (number % 4))
        pictures = [(4, 12, number % 2)] * (number % 3 == 0)
        request = make_request(ids, f"{number}", pictures, **wishes)
        requests.append(replace(request, embeddings=ROWS[number % 2]) if pictures else request)
    expected = served(tiny_engine(MODEL, eos=stops), requests)
    engine = tiny_engine(
        MODEL,
        eos=stops,
        block_size=dice.choice([2, 4, 7]),
        kv_cache_bytes=dice.choice([40, 60, 400]) * BLOCK,
        max_batched_tokens=dice.choice([23, 60, 512]),
        max_sequences=dice.choice([5, 16]),
        prefix_cache=dice.choice(["content", "off"]),
        drafts=dice.choice([1, 4, 15]),
    )
    engine._runner.async_launch = dice.random() < 0.7
    draft(engine, lambda request: [Guess(expected[request.request_id][1], dice.choice([0, 1, 2, 4]))])
    if dice.random() < 0.5:
        engine.scheduler.tokens_should_be_known = lambda batch: dice.random() < 0.5
    again = [replace(request, number=10_000 + request.number) for request in requests]
    events, waiting, cancelled = [], list(again), set()
    while waiting or engine.has_work():
        for request in [waiting.pop() for _ in range(min(len(waiting), dice.randrange(4)))]:
            engine.submit(request)
        if dice.random() < 0.04:
            cancelled.add(request.request_id)
            engine.cancel(request.number)
        events += engine.step()
        engine.scheduler.check()
    for request in again:
        name = request.request_id
        said, reason = tokens_of(events, name), ends(events)[name]
        _, tokens, _, wanted = expected[name]
        if reason == "cancelled":
            assert name in cancelled and said == tokens[: len(said)]
        else:
            assert (said, reason) == (tokens, wanted), request.sampling
    assert engine.metrics.drafted_tokens > 0 and engine.scheduler.blocks.used == 0


def test_a_draft_ends_before_max_tokens_and_with_its_answer():
    engine, runner = make_engine(drafts=15)
    draft(engine, lambda request: [Guess(list(b"abcdefgh" * 9))])
    runner.script["r"] = list(b"abcdefgh")
    engine.submit(make_request([1, 2], max_tokens=7))
    events = run(engine)
    assert text_of(events) == "abcdefg" and ends(events) == {"r": "length"}
    assert events[-1].drafted_tokens == (5, 5)
    # One token of the prompt's step; six that are left: one more than is drafted.
    assert [end - start for ((_, start, end, _),) in runner.batches] == [2, 6]
    for stop in (dict(stop_token_ids=[ord("d")]), dict(stop="d")):
        engine.submit(make_request([1, 2], max_tokens=7, skip_special_tokens=False, **stop))
        events = run(engine)
        assert text_of(events) == "abc" and ends(events) == {"r": "stop"} and events[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_row_that_is_not_finite_counts_where_it_is_reached(wrong):
    """Behind a wrong token it is nobody's."""
    engine, runner = make_engine(drafts=6)
    draft(engine, lambda request: [Guess(list(b"abcdefghijkl"), wrong)])
    choose, odd = runner._choose, []

    def breaks(span, row):
        token, report = choose(span, row)
        place = span.end - span.samples + 1 + row - span.sequence.prompt_length
        if place == 5 and (not wrong or not odd):
            odd.append(row)
            return NOT_FINITE, report
        return token, report

    runner._choose = breaks
    runner.script["r"] = list(b"abcdefghijkl")
    engine.submit(make_request([1, 2, 3], max_tokens=9))
    events = run(engine)
    assert odd[0] > 0
    if wrong:
        assert (text_of(events), ends(events)) == ("abcdefghi", {"r": "length"})
    else:
        assert (text_of(events), ends(events)) == ("abcde", {"r": "error"}) and "position 7" in events[-1].error
    assert engine.metrics.not_finite_logits == (not wrong)


def test_only_what_was_right_is_found_again():
    engine, runner = make_engine(drafts=12, block_size=2)
    runner.script["r"] = list(b"abcdef")
    wrong = list(b"abXYZWVUTS")
    draft(engine, lambda request: [Guess(wrong)])
    engine.submit(make_request([1, 2], max_tokens=7))
    run(engine)
    for answer, cached in ((b"abcdef", 8), (bytes(wrong), 4)):
        engine.submit(sent := make_request([1, 2, *answer, 9], "other", max_tokens=1))
        assert [e.cached_tokens for e in run(engine) if e.request is sent] == [cached]


def test_blocks_of_wrong_drafts_do_not_wear_out_the_prefix_cache():
    engine, _ = make_engine(num_blocks=30, block_size=2, drafts=8)
    engine.submit(make_request(list(range(40)), "kept", max_tokens=1))
    run(engine)
    draft(engine, lambda request: [Guess([5] * 60)])
    engine.submit(make_request([99], "other", max_tokens=14, ignore_eos=True))
    run(engine)
    engine.submit(sent := make_request(list(range(40)), "again", max_tokens=1))
    assert [e.cached_tokens for e in run(engine) if e.request is sent] == [38]
    assert engine.metrics.drafted_tokens == 16


def test_reports_of_several_tokens_of_a_step_come_in_their_order():
    engine, runner = make_engine(drafts=3)
    runner.script["r"] = list(b"abcdef")
    choose = runner._choose
    runner._choose = lambda span, row: (choose(span, row)[0], Report(-float(choose(span, row)[0])))
    draft(engine, lambda request: [Guess(list(b"abcdef"))])
    engine.submit(make_request([1], max_tokens=6, logprobs=0))
    rows = [row for e in run(engine) for row in e.logprobs or []]
    assert [row["logprob"] for row in rows] == [-float(byte) for byte in b"abcdef"]


@pytest.mark.parametrize("asked", [dict(regex="(alpha|beta), (gamma|delta)[0-9]"), dict(json_schema=SCHEMA)])
def test_what_a_form_leaves_no_choice_about_takes_no_steps(asked):
    wishes = dict(temperature=1.3, seed=2, ignore_eos=False, max_tokens=60) | asked
    plain, engine = tiny_engine(MODEL, eos=(EOS,)), tiny_engine(MODEL, eos=(EOS,), drafts=15)
    expected = served(plain, made(**wishes))
    draft(engine, lambda request: [])
    same(served(engine, made(**wishes)), expected)
    assert engine.metrics.drafted_tokens == engine.metrics.accepted_tokens
    assert engine.metrics.steps < 0.6 * plain.metrics.steps


@pytest.mark.parametrize(
    ("asked", "stops", "drafts", "at_once"),
    [
        ({}, (EOS,), 15, True),
        (dict(max_tokens=4), (EOS,), 15, True),
        (dict(min_tokens=20), (EOS,), 15, True),
        (dict(temperature=1.4, seed=2, **PENALTIES), (EOS,), 15, True),
        (dict(stop=["don"]), (EOS,), 15, True),
        (dict(logprobs=0), (EOS,), 15, False),  # the model says how likely each token was
        ({}, (EOS, 3), 15, False),  # and which of them ends the answer
        ({}, (EOS,), 5, False),  # of what must come this many tokens and one are known
        ({}, (EOS,), 0, False),
    ],
    ids=str,
)
def test_what_is_left_of_an_answer_takes_no_step_where_there_is_no_choice(asked, stops, drafts, at_once):
    wishes = dict(regex="(alpha|gamma)done", max_tokens=40, ignore_eos=False) | asked
    expected = served(tiny_engine(MODEL, eos=stops), made(**wishes))
    engine = tiny_engine(MODEL, eos=stops, drafts=drafts)
    same(served(engine, made(**wishes)), expected)
    assert (engine.metrics.steps == engine.metrics.prefill_steps) == at_once


class Pairs(ByteTokenizer):
    """Some pairs of bytes are tokens too, in which the tokenizer writes them."""

    pairs = (b"ab", b"bc", b'{"', b'": ', b"th", b"al")

    def token_bytes(self, token):
        return self.pairs[token - 260] if 260 <= token < 260 + len(self.pairs) else super().token_bytes(token)

    def encode(self, text, special):
        ids, data = [], text.encode()
        while data:
            pair = next((at for at, each in enumerate(self.pairs) if data.startswith(each)), None)
            ids.append(data[0] if pair is None else 260 + pair)
            data = data[1 if pair is None else len(self.pairs[pair]) :]
        return ids


class Beginnings(Pairs):
    """Writes a line's beginning otherwise than the same behind other letters, as Qwen's does of ``'total``. What is
    left is asked for with the last token in front, but not where that token is the end of a character."""

    pairs = (b"ab",)

    def encode(self, text, special):
        before, begins, behind = text.partition("\nab")
        return [*before.encode(), *([ord("\n"), 260] if begins else []), *behind.encode()]


@pytest.mark.parametrize(
    ("tokenizer", "text", "known"),
    [
        (Pairs, "xabc", True),
        (Beginnings, "c\nabc", True),  # asked for with the line's end in front
        (Pairs, "c\u00e9ab", False),  # a token is half a character
        (Pairs, "ab" * 129, False),  # its beginning alone was spelled
    ],
)
def test_of_what_must_come_all_is_known_where_it_is_spelled_alike_behind_each_token(tokenizer, text, known):
    spelling = Constraints(tokenizer(), VOCABULARY, (EOS,))._spelled()
    tokens = tuple(spelling(text))[:5]
    assert spelling.goes_on(text.encode(), tokens) is known
    assert not spelling.goes_on(text.encode(), (*tokens[:-1], 9))


def numbers(mask):
    return [mask] if isinstance(mask, int) else np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


FORMS = [
    dict(regex="(abc){2,4}|th(al|en)+"),
    dict(regex="x?abab(c|bc)"),
    dict(json_schema=SCHEMA),
    dict(regex="é{3}"),
    dict(regex="(b|c)éabé{2}abc"),
]


@pytest.mark.parametrize("asked", FORMS)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer, Pairs, Beginnings])
def test_where_a_token_is_forced_nothing_else_is_allowed(asked, tokenizer):
    """In all of a run, and behind it as if it had been followed token by token."""
    constraints, runs = Constraints(tokenizer(), VOCABULARY, (EOS, 3)), 0
    for seed in range(6):
        dice, one = random.Random(seed), constraints.matcher(SamplingParameters.parse(asked))
        plain = one.copy()
        one.look_ahead(5)
        while True:
            allowed = numbers(one.behind(0))
            assert allowed == numbers(plain.mask) and (not one.forced or len(allowed) == 1)
            ahead = plain.copy()
            assert one.along([*one.forced, 7]) == one.forced
            for at, token in enumerate(one.forced, 1):
                runs += 1
                ahead.advance(token)
                assert numbers(one.behind(at)) == numbers(ahead.mask) and one.knows(at)
            steps = dice.randrange(1, 7)  # of what is forced a step may take a part, and the token behind all of it
            tokens = one.forced[:steps]
            if steps >= len(one.forced):
                tokens = [*tokens, dice.choice(numbers(one.behind(len(tokens))))]
            if tokens[-1] in (EOS, 3):
                break
            one.advance(*tokens)
            for token in tokens:
                plain.advance(token)
    assert runs


@pytest.mark.parametrize(("limits", "first"), [({}, 7), ({"max_batched_tokens": 14}, 3), ({"drafts": 2}, 3)])
def test_what_an_answer_must_begin_with_comes_with_its_prompt(limits, first):
    """As much of it as the step has room for: all that is forced, and the token behind it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = dict(json_schema=schema, max_tokens=40, ignore_eos=False)
    expected = served(tiny_engine(MODEL, eos=(EOS,)), [make_request([7, 8, 9] * 4, "json", **asked)])
    engine = tiny_engine(MODEL, eos=(EOS,), **{"drafts": 8, "max_sequences": 4, **limits})
    engine.submit(make_request([7, 8, 9] * 4, "json", **asked))
    engine.step()
    assert engine.scheduler.running[0].outputs == expected["json"][1][:first]


def test_a_drafter_that_knows_no_vocabulary_ends_before_it():
    class Wild:
        prior = 1.0
        holds = 1

        def propose(self, outputs, most):
            return [3, VOCABULARY, 4][:most] if len(outputs) % 2 else [-1]

    drafting = Drafting([Wild(), Guess([1, 2, 5])], VOCABULARY)
    assert drafting.propose([], 9) == Proposal([1, 2, 5], 0.5)
    assert drafting.propose([1], 9).tokens == [3]


def costs(row_ns, step_ns=1e6):
    model = CostModel()
    for tokens in (1, 1000):
        model.record(tokens, int(step_ns + row_ns * tokens))
    return model


def load(row_ns=0.0, host_ns=0.0):
    made = Load(1000, 100, costs=costs(row_ns), drafts=15, max_rows=200)
    made.between.ns = host_ns
    return made


def proposals(*shares):
    return [Proposal([1] * 10, share) for share in shares]


def test_how_much_is_verified_follows_from_what_rows_cost_and_how_many_were_right():
    assert draft_lengths(load(), proposals(0.9, 0.1), 2, 2, 100) == [10, 10]  # rows that cost nothing
    assert draft_lengths(load(1e4), proposals(0.9, 0.1), 2, 2, 100) == [10, 0]
    assert draft_lengths(load(1e8), proposals(0.9, 0.1), 2, 2, 100) == [0, 0]  # no row is cheaper than another
    busy = load(1e4)
    for _ in range(9):  # where launching a step is computing it, that is no reason for long ones
        busy.record_host_time(True, int(9e6))
    assert draft_lengths(busy, proposals(0.9, 0.1), 2, 2, 100) == [10, 0]
    assert draft_lengths(load(2e4), proposals(1.0, 0.9, 0.0), 50, 50, 100)[::2] == [10, 0]
    assert draft_lengths(load(), proposals(1.0, 0.5), 2, 2, 12) == [10, 2]
    assert draft_lengths(load(), [Proposal((), 0.0)], 1, 1, 9) == [0]


class Asked(Guess):
    """Notes at which places it was asked."""

    def __init__(self, answer):
        super().__init__(answer)
        self.at = []

    def propose(self, outputs, most):
        self.at.append(len(outputs))
        return super().propose(outputs, most)


def verified(drafting, answer, said, most=4):
    """Goes on from ``said`` to the answer's end, a token a step, and verifies all that is proposed; the shares."""
    shares = []
    while said < len(answer):
        tokens, share = drafting.propose(answer[:said], most)
        if tokens:
            shares.append(share)
            right = [one == other for one, other in zip(tokens, answer[said:])]
            drafting.learn(len(tokens), [*right, False].index(False))
        said += 1
    return shares


def test_a_drafter_that_is_wrong_is_verified_twice_and_asked_ever_more_rarely():
    wrong = Asked([1] * 500)
    drafting = Drafting([wrong], VOCABULARY)
    shares = verified(drafting, [2] * 256, 0)
    assert shares[0] == 0.5 and shares[1] < 0.3 and len(shares) == 2 and drafting.proposed == 8
    assert wrong.at[:8] == [0, 1, 2, 4, 8, 16, 32, 64] and max(np.diff(wrong.at)) == 32


def test_a_drafter_that_is_right_again_is_believed_after_one_token():
    drafting = Drafting([Guess([1] * 99)], VOCABULARY)
    verified(drafting, [2] * 4 + [1], 0)
    assert (drafting.proposed, drafting.accepted) == (8, 0)
    assert not drafting.propose([2] * 4, 4).tokens, "its token is held against the one that comes"
    assert drafting.propose([2] * 4 + [1], 4).tokens == [1] * 4
    drafting.learn(4, 4)
    assert drafting.propose([2] * 4 + [1] * 6, 4).share > 0.6


def test_one_mistake_among_what_is_right_changes_little():
    answer = [1] * 10 + [2] + [1] * 10
    drafting = Drafting([Guess([1] * 99)], VOCABULARY)
    shares = verified(drafting, answer, 0)
    assert len(shares) == len(answer) and shares[-1] > 0.8


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.0])
def test_how_many_of_some_tokens_are_likely_to_be_right(share):
    drafting = Drafting([Guess([1] * 9)], VOCABULARY, {Guess: share})
    assert drafting.expected([], 0, 9).gain == pytest.approx(sum(share**place for place in range(1, 10)))


def test_steps_share_the_decision_whether_to_wait_for_tokens(monkeypatch):
    engine, _ = make_engine(drafts=15)
    scheduler, asked = engine.scheduler, []
    monkeypatch.setattr(scheduling, "tokens_should_be_known", lambda *_: asked.append(len(asked)) or True)
    batch = ScheduledBatch([])
    draft(engine, lambda request: [Guess([1] * 99)])
    assert not scheduler.tokens_should_be_known(batch) and not asked, "nothing is drafted"
    scheduler.running.append(engine.submit(make_request([1], max_tokens=9)))
    for steps in range(1, 2 * ASK_EVERY + 1):
        assert scheduler.tokens_should_be_known(batch) and len(asked) == -(-steps // ASK_EVERY)
    scheduler.running.clear()
    assert not scheduler.tokens_should_be_known(batch), "of a load that is gone"


def test_what_earlier_answers_drafts_came_to_is_expected_of_the_next():
    class Other(Guess):
        pass

    priors = {}
    for _ in range(60):
        verified(Drafting([Guess([1] * 9), Other([2] * 9)], VOCABULARY, priors), [2] * 9, 0)
    assert priors[Guess] < 0.02 and priors[Other] > 0.9
    drafting = Drafting([Guess([1] * 9)], VOCABULARY, priors)
    assert drafting.propose([], 4).share == priors[Guess] and drafting.expected([], 1, 4).gain < 0.01


def test_what_would_have_been_right_is_known_without_verifying_it():
    good, bad = Drafting([Guess([1] * 99)], VOCABULARY), Drafting([Guess([2] * 99)], VOCABULARY)
    assert good.expected([], 1, 2) == bad.expected([], 1, 2) == Expected(2, 0.5 * (0.5 + 0.25))
    for said in range(1, 96):  # each time it holds for some tokens
        sure, idle = good.expected([1] * said, 1, 2), bad.expected([1] * said, 1, 2)
    assert sure.gain > 1.9 and idle.gain < 0.01 and good.proposed == bad.proposed == 0
    assert good.expected([1] * 97, 0, 2).rows == 2 and good.expected([1] * 101, 1, 2) == Expected(0, 0)


@pytest.mark.parametrize("followed", [True, False])
def test_a_draft_is_expected_behind_one_in_flight_as_often_as_there_was_one(followed):
    """A drafter that proposes three tokens at a time, and then at once again or not before the next is there."""

    class Pausing(Guess):
        def propose(self, outputs, most):
            return [1] * 3 if followed or len(outputs) % 5 == 0 else []

    drafting = Drafting([Pausing([])], VOCABULARY)
    first, said = None, 0
    for _ in range(30):
        if tokens := drafting.propose([1] * said, 15).tokens:
            drafting.learn(len(tokens), len(tokens))
            expected = drafting.expected([1] * said, 1 + len(tokens), 15)
            first = first or expected
        said += 1 + len(tokens)
    assert first.rows == 1.5 and expected.gain == pytest.approx(expected.rows, rel=0.05)
    assert (expected.rows > 2.9) == followed and (expected.rows < 0.5) != followed


class Running(Sequence):
    turns = 1


def running(plain, drafted=0, constrained=0, turns=2):
    made = []
    for number in range(plain + drafted + constrained):
        drafting = Drafting([Guess([1] * 99)], VOCABULARY) if plain <= number < plain + drafted else None
        sequence = Running(make_request([1], f"{number}", max_tokens=9), drafting=drafting)
        sequence.turns, sequence.in_flight = turns if number >= plain + drafted else 1, 1
        made.append(sequence)
    return made


@pytest.mark.parametrize(
    ("sequences", "host_ns", "known"),
    [
        (dict(plain=9), 0, False),  # nobody has anything of it
        (dict(plain=0, constrained=9), 2e5, True),
        (dict(plain=0, constrained=9), 1.5e6, False),
        (dict(plain=0, constrained=9, turns=3), 1.5e6, True),
        (dict(plain=9, constrained=1), 2e5, False),
        (dict(plain=9, constrained=1), 1e4, True),
        (dict(plain=0, drafted=9), 2e5, True),  # half a token more a step is expected
        (dict(plain=0, drafted=9), 6e5, False),
        (dict(plain=9, drafted=1), 2e5, False),
        (dict(plain=0, constrained=9), 3e6, False),
    ],
)
def test_steps_wait_for_tokens_where_that_gives_more_of_them(sequences, host_ns, known):
    load_ = load(1e2, host_ns)
    load_.running += running(**sequences)
    assert tokens_should_be_known(load_, 0) is known


def test_answers_with_a_draft_in_flight_are_not_counted_in_the_step_that_would_be_planned_ahead():
    """Such are proposed nothing more, but would sit that step out."""
    load_ = load(1e2, 4e5)
    load_.running += running(plain=9, drafted=9)
    for sequence in load_.running[9:]:
        sequence.drafting.learn(1, 0)
        sequence.drafting.propose = lambda outputs, most: Proposal((), 0.0)
    assert not tokens_should_be_known(load_, 0)
    for sequence in load_.running[9:]:
        sequence.draft = [2]
    assert tokens_should_be_known(load_, 0)


def test_steps_that_the_host_takes_longer_for_than_the_device_wait_for_tokens():
    load_ = load(1e2, 1.1e6)
    load_.running += running(plain=0, constrained=9)
    assert not tokens_should_be_known(load_, 0)
    load_.record_host_time(False, int(1.5e6))
    assert tokens_should_be_known(load_, 0)
    load_.running += running(plain=99)
    assert not tokens_should_be_known(load_, 0)


@pytest.mark.parametrize("prompts", [0, 200])
def test_whether_steps_wait_does_not_depend_on_prompts_whose_tokens_cost_the_same_in_any(prompts):
    for host_ns, known in ((9e5, True), (1.1e6, False)):
        load_ = load(1e4, host_ns)
        load_.running += running(plain=0, constrained=9)
        assert tokens_should_be_known(load_, prompts) is known


def test_the_hosts_time_is_the_median_of_the_recent_steps():
    load_ = load()
    for ns in (2, 9, 7, 90, 8):
        load_.between.record(ns)
        load_.record_host_time(True, 5 + ns)
    assert load_.between.ns == 8 and [load_.busy[known].ns for known in (False, True)] == [0, 13]
    load_.record_host_time(False, 6)
    assert 7.9 < load_.between.ns < 8 and 12.9 < load_.busy[True].ns < 13 and load_.busy[False].ns == 6


def test_what_the_device_waits_between_steps_is_its_own_time_and_none_where_nothing_follows_at_once():
    engine, runner = make_engine(drafts=3, num_blocks=300)
    runner.async_launch, waited = True, []
    engine.scheduler.tokens_should_be_known = lambda batch: True
    engine.scheduler.load.between.record = waited.append
    for number in range(2):  # one after the other: before the second's first step nothing was to be done
        engine.submit(make_request([1, 2, 3], f"{number}", max_tokens=4))
        run(engine)
    assert waited == [Known.WAITED_NS] * 6


def test_what_the_host_took_long_ago_is_tried_again():
    """As masks of a grammar's first steps, which take longer than all others."""
    load_ = load()
    for _ in range(8):
        load_.record_host_time(True, int(500e6))
    for _ in range(100):
        load_.record_host_time(False, int(1e6))
    load_.record_host_time(True, int(2e6))
    assert load_.busy[True].ns == 500e6  # one more is no reason to think otherwise
    steps = 0
    while load_.busy[True].ns > 2e6:
        load_.record_host_time(False, int(1e6))
        steps += 1
    assert steps < 3000
    load_.record_host_time(True, int(3e6))
    assert load_.busy[True].ns == 3e6


@pytest.mark.parametrize("drafted", [0, 1, 31, 33, 100, 991])
def test_a_step_with_drafts_has_whole_tiles_and_as_many_prompts_as_without(drafted):
    left = StepBudget(most=1024, full=320, short=64, urgent=0).beside(drafted)
    assert left.most == 1024 - drafted and left.short == min(64, left.most)
    assert (left.full + drafted) % TILE == 0 and (abs(left.full - 320) <= TILE / 2 or left.full == left.most)


def test_rows_of_a_step_have_a_limit():
    """Prompts that wait could end in the same step, and each choose a token."""
    engine, runner = make_engine(drafts=15, max_sequences=4, max_batched_tokens=200, num_blocks=300)
    draft(engine, lambda request: [Guess([7] * 99)])
    for number in range(9):
        runner.script[f"{number}"] = [7]
        engine.submit(make_request([number] * 3, f"{number}", max_tokens=30 + number))
    events = run(engine)
    assert set(ends(events).values()) == {"length"}
    rows = [sum(samples for *_, samples in batch) for batch in runner.batches]
    assert 12 < max(rows) <= 16


def test_a_form_s_answers_go_on_in_every_step_beside_others():
    """Not in every second one, though steps are planned ahead of the one before."""

    def steps(**waits):
        engine, runner = make_engine(async_launch=True)
        draft(engine, lambda request: [])
        if waits:
            engine.scheduler.tokens_should_be_known = lambda batch: waits["waits"]
        for number in range(3):
            engine.submit(make_request([number], f"{number}", max_tokens=30, regex="[ab]{20}"))
        engine.submit(make_request([9], "plain", max_tokens=60, ignore_eos=True))
        events = run(engine)
        name, *_ = [event.request.request_id for event in events if event.finish_reason == "stop"]
        rows = [{sequence.request.request_id for sequence, *_ in batch} for batch in runner.batches]
        return tokens_of(events, name), max(at for at, batch in enumerate(rows) if name in batch)

    answer, last = steps()
    assert (answer, 2 * last) == steps(waits=False) and last == len(answer) - 1


@pytest.mark.parametrize("known", [True, False])
def test_a_request_is_not_looked_at_while_the_device_waits_for_the_next_step(monkeypatch, known):
    monkeypatch.setattr("tessera.engine.engine._LONGEST_HURRY_S", 60)
    engine, _ = make_engine(async_launch=True)
    engine.scheduler.tokens_should_be_known = lambda batch: known
    engine.submit(make_request([1], "first", max_tokens=20))
    engine.step()
    engine.step()
    schedule, seen = engine.scheduler.schedule, []
    other = threading.Thread(target=engine.submit, args=[make_request([2], "second", max_tokens=3)])

    def planned(*given):
        other.start()
        other.join(0.2 if known else 60)
        seen.append(other.is_alive())
        engine.scheduler.schedule = schedule
        return schedule(*given)

    engine.scheduler.schedule = planned
    events = engine.step()
    other.join()
    assert seen == [known]
    assert ends(events + run(engine)) == {"first": "length", "second": "length"}


def test_a_step_that_fails_leaves_nobody_waiting(monkeypatch):
    engine, runner = make_engine(async_launch=True)
    engine.scheduler.tokens_should_be_known = lambda batch: True
    engine.submit(make_request([1], "first", max_tokens=20))
    engine.step()
    monkeypatch.setattr(runner, "launch", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine._ran[0].result.device_ns = lambda: 1 / 0  # as one that is lost would say
    assert ends(engine.text_of(engine.fail_all("it broke"))) == {"first": "error"}
    assert engine._unhurried.is_set()


def test_what_a_request_gives_along_is_drafted():
    """Its own text, then what answers of its pool had; nobody else's."""

    def steps(name, **given):
        before = engine.metrics.steps
        runner.script[name] = answer
        engine.submit(make_request([1, 2], name, max_tokens=len(answer), **given))
        assert text_of(run(engine), name) == answer.decode()
        return engine.metrics.steps - before

    answer = b"<table><tr><td>one</td><td>2</td></tr></table>"
    engine, runner = make_engine(drafts=15)
    draft_of = engine._drafters
    draft(engine, draft_of)
    assert steps("plain") == len(answer)
    assert steps("draft", draft="<table><tr><td>One</td><td>2</td></tr></table>") < 8
    first = steps("first", draft_pool="mine")
    assert steps("again", draft_pool="mine") < first / 2 and steps("other", draft_pool="other") == first
    silent, runner = make_engine()
    engine = silent
    assert steps("off", draft=answer.decode(), draft_pool="mine") == len(answer)
    assert not silent.metrics.drafted_tokens
