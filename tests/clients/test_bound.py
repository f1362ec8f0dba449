"""A cascade's bound: its arithmetic against exact sums, and what it promises against drawn pictures."""

from math import comb, inf
from random import Random

import pytest

from tessera_client import InvalidRequest
from tessera_evaluation.cascade import (
    THRESHOLDS,
    Pair,
    check_enough,
    choose,
    document,
    needed,
    one_a_picture,
    plan,
    tail,
    upper_limit,
)
from tessera_evaluation.datasets import Item
from tessera_wire import question_class


def exact(events: int, of: int, share: float) -> float:
    return sum(comb(of, count) * share**count * (1 - share) ** (of - count) for count in range(events + 1))


@pytest.mark.parametrize("events, of", [(0, 1), (0, 299), (3, 773), (20, 400), (399, 400), (400, 400)])
@pytest.mark.parametrize("share", [0.005, 0.3, 0.97])
def test_the_tail_is_the_binomials(events: int, of: int, share: float) -> None:
    assert tail(events, of, share) == pytest.approx(exact(events, of, share), rel=1e-9, abs=1e-300)


def test_as_many_pictures_as_are_needed_are_enough_and_one_fewer_is_not() -> None:
    assert needed(0.01, 0.95) == 299  # 0.99^299 = 0.0495
    for differ in (0, 1, 7):
        most = needed(0.02, 0.9, differ)
        assert exact(differ, most, 0.02) <= 0.1 < exact(differ, most - 1, 0.02)


def test_above_an_upper_limit_so_few_events_are_too_unlikely() -> None:
    for events, of in ((0, 20), (5, 100), (60, 100)):
        limit = upper_limit(events, of, 0.95)
        assert exact(events, of, limit) == pytest.approx(0.05, abs=1e-6)
    assert upper_limit(9, 9, 0.95) == 1.0


def drawn(dice: Random, size: int) -> list[tuple[float, bool]]:
    """Margins of 3 nats on average; answers differ the rarer, the larger they are."""
    return [(margin := dice.expovariate(1 / 3), dice.random() < 0.4 * 2.0**-margin) for _ in range(size)]


def test_the_bound_holds_as_often_as_is_said() -> None:
    """The least margin at which few enough differed among the drawn ones breaks it far oftener."""
    dice = Random(5)
    world = drawn(dice, 5_000)
    broken = naive = 0
    for _ in range(200):
        some = dice.choices(world, k=400)
        threshold, tried = choose(some, 0.02, 0.9)
        lax = min(t for t in THRESHOLDS if sum(d and m >= t for m, d in some) <= 0.02 * len(some))
        broken += sum(differs and margin >= threshold for margin, differs in world) > 0.02 * len(world)
        naive += sum(differs and margin >= lax for margin, differs in world) > 0.02 * len(world)
        assert [each.threshold for each in tried] == list(THRESHOLDS[: len(tried)]) and tried[-2].threshold == threshold
        assert tried[-2].p_value <= 0.1 < tried[-1].p_value
    assert 0 < broken <= 26 and naive > 60  # 10 % of 200 and two standard deviations


def test_where_nothing_differs_nothing_is_escalated_and_where_all_does_everything_is() -> None:
    assert choose([(1.0, False)] * 299, 0.01, 0.95)[0] == 0.0
    assert choose([(1.0, False)] * 298, 0.01, 0.95)[0] == inf
    assert choose([(80.0, True)] * 299, 0.01, 0.95)[0] == inf


def pairs(question: str, size: int, margin: float = 2.0, differ: int = 0) -> list[Pair]:
    return [Pair(question, margin, place < differ, 64, 448, (place >= differ, True)) for place in range(size)]


def test_a_plan_has_its_evidence_and_what_is_to_be_watched() -> None:
    sure, unsure = pairs("A door?", 900, margin=5.0), pairs("A door?", 100, margin=1.0, differ=40)
    policy = plan(sure + unsure, 0.01, 0.95)
    assert policy["margin"] == 1.0443 and "classes" not in policy
    evidence = policy["evidence"]
    counts = {"pictures": 1000, "escalated": 100, "differ": 0, "differ_without": 40}
    assert counts.items() <= evidence.items()
    assert evidence["tokens"] == {"cascade": 108.8, "full": 448.0}
    assert evidence["recall"] == {"cascade": 1.0, "first": 0.96, "full": 1.0}
    assert evidence["tried"]["margin"][-1][:2] == [1.0, 40] and evidence["tried"]["margin"][-1][2] > 0.05
    watch = policy["watch"]
    assert watch["escalated"] == {"share": 0.1, "limit": pytest.approx(upper_limit(100, 1000, 0.95), abs=1e-6)}
    assert watch["disagreed"]["limit"] == pytest.approx(0.01 / 0.9, abs=1e-6)
    whole = document(policy, first={"max_tiles": 1}, about={"model": "m"})
    assert whole["tile_policy"] == {"cascade": {"first": {"max_tiles": 1}, "margin": 1.0443}}
    assert whole["evidence"]["model"] == "m" and whole["watch"] == watch


def test_each_question_with_enough_pictures_has_a_bound_of_its_own() -> None:
    """Of three parts each has a third of the 5 %: 408 pictures of which none differ."""
    doors, cracks = pairs("A door?", 500, margin=5.0), pairs("A crack?", 408, margin=3.0, differ=30)
    rare = [pair for number in range(20) for pair in pairs(f"Item {number}?", 10)]
    policy = plan(doors + cracks + rare, 0.01, 0.95, each_question=True)
    assert policy["classes"] == {question_class("A door?"): 0.0, question_class("A crack?"): 3.0844}
    assert policy["margin"] == "inf"  # 200 are too few for the others
    assert policy["evidence"]["escalated"] == 608
    fewer = plan(doors + cracks[1:] + rare, 0.01, 0.95, each_question=True)
    assert [*fewer["classes"]] == [question_class("A door?")] and 0 < fewer["margin"] < 4


def test_without_margins_the_first_cut_is_for_all_or_for_none() -> None:
    """As for answers too long for a cascade."""
    assert needed(0.01, 0.95, 1) == 473
    policy = plan(pairs("Text Recognition:", 473, inf, differ=1), 0.01, 0.95)
    assert policy["margin"] == 0.0 and "watch" not in policy
    counts = {"pictures": 473, "escalated": 0, "differ": 1, "differ_without": 1}
    assert counts.items() <= policy["evidence"].items()
    assert policy["evidence"]["tokens"] == {"cascade": 64.0, "full": 448.0}
    assert document(policy, first={"prune": "equal"})["tile_policy"] == {"prune": "equal"}
    with pytest.raises(InvalidRequest, match="1 of 472 answers differ .* takes 473 pictures"):
        plan(pairs("Text Recognition:", 472, inf, differ=1), 0.01, 0.95)


@pytest.mark.parametrize(
    "answers, words",
    [
        (pairs("?", 298), "298 pictures cannot show that at most 1 % may differ, with 95 % confidence: it takes 299"),
        (
            pairs("?", 400, 99.0, differ=4),
            "4 of 400 answers differ of which the model is as sure as can be: .* takes 913",
        ),
    ],
)
def test_too_few_pictures_are_refused_with_the_number_that_is_needed(answers: list[Pair], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        plan(answers, 0.01, 0.95)


def test_too_few_are_refused_before_any_is_asked() -> None:
    check_enough(299, 0.01, 0.95)
    with pytest.raises(InvalidRequest, match="it takes 299 at least"):
        check_enough(298, 0.01, 0.95)


def test_of_a_picture_one_question_is_drawn(tmp_path) -> None:
    items = [Item(tmp_path / f"{place // 3}.jpg", f"{place}?", "", "other", "all") for place in range(90)]
    chosen = one_a_picture(items)
    assert len({item.picture for item in chosen}) == len(chosen) == 30
    assert {int(item.question[:-1]) % 3 for item in chosen} == {0, 1, 2}
    assert one_a_picture(items) == chosen and len(one_a_picture(items, 7)) == 7
