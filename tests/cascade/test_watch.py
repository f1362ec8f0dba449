from itertools import product
from math import log
from random import Random
from statistics import fmean

import pytest

from tessera.cascade import AVERAGE_RUN, Expected, Plan, Rise, Watch
from tessera.errors import ConfigError

PLANNED = {
    "low": 1.0,
    "high": 3.0,
    "escalated": {"share": 0.05, "limit": 0.059},
    "below": {"share": 0.25, "limit": 0.267},
    "above": {"share": 0.25, "limit": 0.267},
    "disagreed": {"share": 0.0105, "limit": 0.0105},
}


def watch() -> Watch:
    return Watch(Plan.read(PLANNED))


def margin(dice: Random, below: float = 0.25, above: float = 0.25) -> float:
    """Uniform within each part, so that a twentieth is below 0.2."""
    part = dice.random()
    if part < below:
        return part / below
    return 3 + dice.random() if part > 1 - above else 1 + 2 * dice.random()


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_on_average_the_evidence_is_no_more_than_the_requests_while_the_limit_holds(share: float) -> None:
    """Of every possible run of ten requests; at the limit itself it is exactly as much."""
    mean = 0.0
    for run in product((False, True), repeat=10):
        rise, chance = Rise("", Expected(0.1, 0.2)), 1.0
        for event in run:
            evidence = rise.saw(event)
            chance *= share if event else 1 - share
        mean += chance * evidence
    assert mean == pytest.approx(10) if share == 0.2 else mean < 10


def test_a_doubled_rate_of_disagreement_is_found_nearly_as_soon_as_it_can_be() -> None:
    usual, doubled = 0.0105, 0.021
    divergence = doubled * log(2) + (1 - doubled) * log((1 - doubled) / (1 - usual))
    runs = []
    for seed in range(40):
        dice, watched = Random(seed), watch()
        while not watched.audited(dice.random() < doubled):
            pass
        runs.append(watched.audits)
    assert fmean(runs) < 1.2 * log(AVERAGE_RUN) / divergence


def test_twice_as_many_escalated_answers_raise_the_alarm_within_2000_requests() -> None:
    runs = []
    for seed in range(40):
        dice, watched = Random(seed), watch()
        while not watched.alarm:
            escalated = dice.random() < 0.1
            watched.request(0.1 if escalated else margin(dice, 0.16, 0.25), escalated)
        runs.append(watched.requests)
        assert watched.alarm.startswith("answers escalated: ")
    assert sorted(runs)[37] < 2000


@pytest.mark.parametrize("below, above, name", [(0.5, 0.1, "margins below 1: "), (0.1, 0.5, "margins above 3: ")])
def test_other_margins_raise_the_alarm_where_no_more_is_escalated(below: float, above: float, name: str) -> None:
    dice, watched = Random(1), watch()
    while not watched.alarm:
        watched.request(margin(dice, below, above), False)
    assert watched.requests < 300 and watched.alarm.startswith(name)


def test_as_planned_there_is_no_alarm() -> None:
    dice, watched = Random(2), watch()
    for _ in range(50_000):
        nats = margin(dice)
        watched.request(nats, nats < 0.2)
        watched.audited(dice.random() < 0.0105)
    assert watched.alarm == ""
    assert 2300 < watched.escalated < 2700 and 450 < watched.disagreements < 600


def test_an_alarm_is_told_once_and_stays_with_its_figures() -> None:
    watched = watch()
    for _ in range(1000):
        watched.audited(False)
    told = [words for _ in range(100) if (words := watched.audited(True))]
    assert told == [watched.alarm]
    assert watched.alarm == (
        "audited answers that differ from the full cut's: 12 of the last 12 (100 %), planned 1.05 % and at most 1.05 %"
    )
    assert watched.request(0.0, True) is None and watched.disagreements == 100


def test_a_plan_that_escalates_all_watches_nothing_of_it() -> None:
    watched = Watch(Plan.read(PLANNED | {"escalated": {"share": 1.0, "limit": 1.0}}))
    dice = Random(3)
    assert not any(watched.request(margin(dice), True) for _ in range(5000))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"low": None}, "low|float"),
        ({"above": {"share": 0.3, "limit": 0.2}}, "above must have 0 <= share <= limit"),
        ({"disagreed": {"share": 0.0, "limit": 0.0}}, "disagreed must have"),
        ({"escalated": {"share": 0.1, "most": 0.2}}, "most"),
        ({"classes": {}}, "unknown key 'classes'"),
    ],
)
def test_what_a_plan_does_not_say_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Plan.read(PLANNED | change)
    with pytest.raises(ConfigError, match="high"):
        Plan.read({name: value for name, value in PLANNED.items() if name != "high"})
