"""A cascade by the share that escalates: what each request is, how long they wait, and a trial."""

from contextlib import nullcontext
from typing import Any

import counting
import pytest
from bench import cascade_speed
from closed_loop import Answered
from gpu_power import Draw
from measuring import Taken
from serving import Running

from tessera.launcher.process import Server


def test_every_few_requests_have_the_share_and_the_order_is_the_seeds():
    found = cascade_speed.order({"escalated": 5, "kept": 95}, 1)
    assert [found[first : first + 20].count("escalated") for first in range(0, len(found), 20)] == [1] * 100
    assert found == cascade_speed.order({"escalated": 5, "kept": 95}, 1)
    assert found != cascade_speed.order({"escalated": 5, "kept": 95}, 2)
    assert set(cascade_speed.order({"escalated": 0, "kept": 100}, 1)) == {"kept"}


def test_the_wait_is_the_worse_of_the_median_and_the_longest(printed: Any):
    spent = {"escalated": [2.0, 3.0, 9.0], "full": [1.0, 2.0, 4.0], "kept": [0.5]}
    answers = [Answered(0.0, each, None, 4, 1, kind=way) for way, seconds in spent.items() for each in seconds]
    cascade_speed.report_waits("wait", answers)
    figure = printed()["wait"]
    assert (figure["value"], figure["p50"], figure["p99"]) == (2.25, 1.5, 2.25)
    assert figure["requests"] == {"escalated": 3, "full": 3, "kept": 1} and figure["p50_ms"]["kept"] == 500


def test_a_ways_joules_are_its_turns_watts_by_their_rates(printed: Any):
    run = counting.count(0.0, [Answered(float(ended), 1.0, None, 4, 1) for ended in range(8)], 1)
    turns = [Taken(run, Draw(watts, 1980, 1), {}, []) for watts in (300.0, 500.0)]
    cascade_speed.report_way("way", turns, at_least=90)
    found = printed()
    assert {name: figure["value"] for name, figure in found.items()} == {
        "way.req_s": 1, "way.p99_ms": 1000, "way.joules": 400,
    }  # fmt: skip
    assert found["way.req_s"]["turns"] == 2 and found["way.req_s"]["at_least"] == 90


@pytest.mark.server
def test_a_trial_on_a_cpu(server: Server, emitted: Any, monkeypatch: pytest.MonkeyPatch):
    """Of the server that tests share; the program's own is started as the others' are."""
    running = Running([server.grpc_url], [server.http_url], [server.metrics_url], "", 0.0)
    monkeypatch.setattr(cascade_speed, "serve", lambda asked: nullcontext(running))
    monkeypatch.setattr(cascade_speed, "LEAST", 20)
    few = ("--in-flight", "1", "--processes", "0", "--seconds", "0", "--shares", "5")
    found = emitted(cascade_speed, "--gpus", "", *few)
    speed = {f"trial.cascade.W2.cpu.{name}" for name in ("full.req_s", "full.p99_ms", "req_s", "p99_ms", "over_full")}
    assert set(found) == {*speed, "trial.cascade.escalated_wait.cpu"}
    assert sum(found["trial.cascade.escalated_wait.cpu"]["requests"].values()) == 20
