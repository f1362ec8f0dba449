"""Which token is chosen."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_fakes import make_request
from penalties_reference import penalized

from tessera.engine.execution import sampler
from tessera.engine.execution.penalties import Histories, echoes, history
from tessera.engine.execution.sampler import Choices, SamplingRow, sample, uniform
from tessera.engine.sequence import MOST_MARGIN, SamplingParameters, Sequence
from tessera.kernels.fixed_rows import FixedRows
from tessera.kernels.transfer import Moment

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5]).log_softmax(0)


def row(seed=0, place=0, forbidden=(), **parameters):
    return SamplingRow(SamplingParameters.parse(parameters), seed, place, frozenset(forbidden))


def tokens(logits, rows):
    return sample(logits, rows, Moment(logits.device)).tokens()


def test_seeds_and_places_differ():
    logits = torch.zeros(1, 1000)
    chosen = {tokens(logits, [row(seed, place, temperature=1)])[0][0] for seed in range(5) for place in range(5)}
    assert len(chosen) > 20
    assert uniform(7, 3) == 0.32541466495141846  # a seed stays worth the same in later versions
    values = [uniform(seed, 0) for seed in range(-500, 500)]
    assert 0.45 < sum(values) / 1000 < 0.55 and min(values) >= 0 and max(values) < 1


def test_logprobs_describe_the_model_not_the_sampling():
    sampled = row(temperature=0.1, top_k=1, logprobs=2, forbidden=[1])
    biased = row(logit_bias={"0": 100}, logprobs=0)
    none, (chosen, report), (other, own) = tokens(LOGITS.repeat(3, 1) + 3, [row(temperature=1e-30), sampled, biased])
    assert none == (1, None) and chosen == 4
    assert other == 0 and own == (pytest.approx(float(LOGITS[0]), abs=1e-5), (), 0.0)
    assert math.isclose(report.logprob, float(LOGITS[4]), abs_tol=1e-5)
    assert [token for token, _ in report.top] == [1, 4]
    assert math.isclose(report.top[0][1], float(LOGITS[1]), abs_tol=1e-5)


def test_of_equally_likely_tokens_a_deterministic_server_reports_the_first():
    logits = torch.zeros(2, 3000)
    logits[1, 7::100] = 3
    with FixedRows():
        (_, even), (_, peaks) = tokens(logits, [row(logprobs=5)] * 2)
    assert [token for token, _ in even.top] == [0, 1, 2, 3, 4]
    assert [token for token, _ in peaks.top] == [7, 107, 207, 307, 407]


@pytest.mark.parametrize("at_once", [256, 16])
def test_a_deterministic_server_samples_as_others_do(at_once, monkeypatch):
    """The same tokens, but for one whose number falls between two sums."""
    monkeypatch.setattr(sampler, "_ROWS_AT_ONCE", at_once)
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(1)) * 2
    rows = [row(seed, seed, temperature=0.9, top_p=0.9, top_k=40, logprobs=3) for seed in range(len(logits))]
    expected = tokens(logits.clone(), rows)
    with FixedRows():
        found = tokens(logits.clone(), rows)
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, report), (_, other) in zip(found, expected):
        assert report.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in report.top] == [token for token, _ in other.top]


def test_the_margin_is_between_those_that_a_token_was_chosen_among():
    wants = SamplingRow(SamplingParameters.parse({}), 0, 0, margin=True)
    rows = [
        wants,  # 2 against 1.5
        wants._replace(forbidden=frozenset([4])),  # 2 against 1
        wants._replace(parameters=SamplingParameters.parse({"logit_bias": {"0": 2.25}})),  # 2.25 against 2
        wants._replace(mask=np.array([0b01001], np.uint8)),  # 0 against -1
        wants._replace(mask=np.array([0b00100], np.uint8)),
        wants._replace(mask=3),
    ]
    found = tokens(LOGITS.repeat(len(rows), 1), rows)
    assert [token for token, _ in found] == [1, 1, 0, 0, 2, 3]
    margins = [report.margin for _, report in found]
    assert margins == pytest.approx([0.5, 1, 0.25, 1, MOST_MARGIN, MOST_MARGIN], abs=1e-6)


ASKED = [
    dict(),
    dict(repetition_penalty=1.7),
    dict(presence_penalty=1.5),
    dict(frequency_penalty=0.9),
    dict(no_repeat_ngram_size=1),
    dict(no_repeat_ngram_size=2),
    dict(no_repeat_ngram_size=3, frequency_penalty=-0.5),
    dict(repetition_penalty=0.6, frequency_penalty=0.3, presence_penalty=-1, no_repeat_ngram_size=4),
    dict(no_repeat_ngram_size=10**9),
]


def sequences(generator, small):
    """Of each kind of ``ASKED``; every second prompt holds two pictures, and tokens from so few that they repeat."""
    made = []
    for number, asked in enumerate(ASKED):
        ids = torch.randint(0, small, (12 + number,), generator=generator).tolist()
        pictures = [(1, 3, 5), (6, 2, 6)] if number % 2 else []
        made.append(Sequence(make_request(ids, f"{number}", pictures, max_tokens=40, **asked)))
    return made


@pytest.mark.parametrize("everybody", [False, True])  # whether all rows ask for penalties
def test_logits_of_every_token_are_the_processors(everybody):
    """Not only the likeliest; rows that ask for nothing stay as they are."""
    generator = torch.Generator().manual_seed(5)
    batch, histories = sequences(generator, 20)[everybody:], Histories(16, torch.device("cpu"))
    for sequence in batch:
        sequence.outputs = torch.randint(0, 20, (9,), generator=generator).tolist()
        sequence.in_flight = 1
    logits = torch.randn(len(batch), 50, generator=generator) * 5
    found = histories.select(batch).applied(logits.clone())
    for row, sequence in enumerate(batch):
        prompt = history(sequence)[:-9].tolist()
        expected = penalized(logits[row], prompt, sequence.outputs, sequence.request.sampling)
        expected = expected.clamp(min=torch.finfo(torch.float32).min)  # minus infinity would be no number
        assert torch.equal(found[row], expected), sequence.request.sampling
    assert torch.equal(found[0], logits[0]) != everybody


@pytest.mark.parametrize(("lines", "stays"), [(16, True), (9, False)])
def test_who_sits_steps_out_keeps_its_line_unless_others_need_it(monkeypatch, lines, stays):
    """Drafts are verified before: the line holds what of them was right. An answer by a form is written again."""
    generator = torch.Generator().manual_seed(6)
    batch, histories = sequences(generator, 9)[1:], Histories(lines, torch.device("cpu"))
    batch.append(Sequence(make_request([1, 2, 1], "form", max_tokens=40, presence_penalty=1, regex="a*")))
    written, write = [], Histories._write
    monkeypatch.setattr(Histories, "_write", lambda self, new: (written.extend(new), write(self, new)))

    def step(members, drafted=0):
        for each in members:
            each.drafting = SimpleNamespace(learn=lambda proposed, accepted: None)
            each.expect(torch.randint(0, 9, (drafted,), generator=generator).tolist())
        penalties = histories.select(members)
        logits = torch.randn(len(members) * (1 + drafted), 9, generator=generator)
        chosen = penalties.applied(logits).argmax(dim=1)
        penalties.append(chosen)
        rows = iter(chosen.tolist())
        for each in members:
            taken = [(next(rows), None) for _ in range(1 + drafted)]
            each.in_flight -= 1
            each.take(taken)

    step(batch, drafted=3)
    others = [Sequence(make_request([1], f"other {name}", max_tokens=40, presence_penalty=1)) for name in "ab"]
    step([batch[0], *others])
    written.clear()
    step(batch)
    step(batch)
    assert batch[-1] in written and (len(written) == 1) is stays
    fresh = Histories(16, torch.device("cpu"))
    fresh.select([each for each in batch if not each.expect()])
    for each in batch:
        (line, other), length = (found._held[each.request.number] for found in (histories, fresh)), len(history(each))
        matters = 1 + (each.request.sampling.no_repeat_ngram_size > 1)  # echoes do for n-grams alone
        for ours, theirs in zip(histories.lines[:matters], fresh.lines):
            assert torch.equal(ours[line.slot, :length], theirs[other.slot, :length])


def test_the_smallest_penalty_makes_no_nan():
    sequence = Sequence(make_request([1], max_tokens=3, repetition_penalty=1e-300))
    sequence.in_flight = 1
    for logits in ([[0.5, 2.0]], [[-0.5, 0.0]]):
        applied = Histories(1, torch.device("cpu")).select([sequence]).applied(torch.tensor(logits))
        assert not applied.isnan().any() and applied.argmax() == 1


@pytest.mark.parametrize("length", [0, 1, 2, 30])
def test_echoes_count_equal_tokens_backwards(length):
    tokens = np.random.default_rng(0).integers(0, 2, length)
    last, counted = tokens[::-1], echoes(tokens)
    assert len(counted) == length and not any(counted[:1])
    for distance, found in list(enumerate(counted))[1:]:
        before = last[distance:]
        assert before[:found].tolist() == last[:found].tolist()
        assert found == len(before) or before[found] != last[found]


class Asking:
    """A sequence, as far as a step asks it which tokens it may choose."""

    def __init__(self, masks, **parameters):
        self.draft, self.masks = [0] * (len(masks) - 1), masks
        self.request = SimpleNamespace(sampling=SamplingParameters.parse(parameters))
        self.likeliest = self.request.sampling.likeliest
        self.greedy = self.likeliest and not self.request.sampling.constraint

    def mask(self, drafted):
        return self.masks[drafted]


def head(hidden):
    """As if logits were the hidden rows."""
    return hidden


def test_what_is_likeliest_of_masked_rows_is_what_sampling_chooses():
    """Forced tokens, masks and rows without any, of drafts too; and rows that are not finite."""
    random, schema = np.random.default_rng(0), {"json_schema": {"type": "object"}}
    masks = [random.integers(0, 256, 13, dtype=np.uint8) for _ in range(4)]
    asking = [Asking([7, 3, masks[0]], **schema), Asking([None]), Asking([masks[1]], **schema), Asking([9], **schema)]
    asking += [Asking([masks[2], masks[3]], **schema)]
    logits = torch.from_numpy(random.normal(size=(8, 100))).bfloat16()
    logits[1, 5], logits[4, 2], logits[7, 99] = float("nan"), float("inf"), -float("inf")
    choices = Choices.of(asking)
    assert choices is not None and choices.free.tolist() == [2, 3, 4, 6, 7]
    parameters = SamplingParameters.parse({})
    every = [SamplingRow(parameters, 0, 0, mask=each.mask(n)) for each in asking for n in range(len(each.masks))]
    chosen = [token for token, _ in tokens(logits.clone(), every)]
    assert choices.made(logits, head).tolist() == chosen
    free = Choices.of([each for each in asking if not any(isinstance(mask, int) for mask in each.masks)])
    assert free.made(logits[[3, 4, 6, 7]], head).tolist() == [chosen[row] for row in (3, 4, 6, 7)]


def test_where_nothing_is_to_choose_no_logits_are_made():
    asking = [Asking([7, 3], json_schema={"type": "object"})]
    assert Choices.of(asking).made(torch.eye(100)[[1, 2]], None).tolist() == [7, 3]
    made, hidden = [], torch.eye(100)[[1, 2, 30]]
    chosen = Choices.of([*asking, Asking([None])]).made(hidden, lambda rows: made.append(rows) or rows)
    assert chosen.tolist() == [7, 3, 30] and torch.equal(made[0], hidden[2:])


@pytest.mark.parametrize("more", [{"temperature": 1.0}, {"logprobs": True}, {"logit_bias": {"3": 1.0}}])
def test_rows_that_ask_for_more_than_the_likeliest_are_sampled(more):
    asking = [Asking([5], json_schema={"type": "object"}), Asking([6], json_schema={"type": "object"}, **more)]
    assert Choices.of(asking[:1]) is not None
    assert Choices.of(asking) is None
