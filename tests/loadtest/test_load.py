"""The command: what its figures are called, and what is in them."""

from typing import Any
from unittest import mock

import load
import measuring
import open_loop
import pytest
from closed_loop import Answered
from open_loop import Outcome
from workloads import WORKLOADS

CEILING = ["--ceiling", "--target", "openai", "--processes", "1", "--seed", "7"]


def test_a_workload_with_the_target_in_its_figures_names(emitted):
    figures = emitted(load, *CEILING, "--workloads", "W1", "--concurrency", "2", "--least", "20")
    names = {f"openai.serve.W1.c2.ceiling.{what}" for what in ("req_s", "whole", "p99_over_p50")}
    assert set(figures) == names
    rate = figures["openai.serve.W1.c2.ceiling.req_s"]
    assert (rate["requests"], rate["concurrency"], rate["seed"]) == (20, 2, 7)
    assert rate["ci95"] >= 0 and len(rate["first_picture"]) == 8 and "stages_p50" not in rate
    assert rate["command"].startswith('make bench NAME=load ARGS="--ceiling --target openai ')


def test_a_workload_of_any_shape_names_the_shape_that_it_was_asked_of(emitted, stood_in):
    few = ["--workloads", "W7c", "--concurrency", "2", "--least", "20", "--processes", "1", "--seed", "7"]
    stood_in(load)
    ours = emitted(load, *few, "--gpus", "", "--checkpoint", "loadtest/shapes/mineru25-shape")
    assert set(ours) == {f"serve.W7c.mineru25.c2.cpu.{what}" for what in ("req_s", "whole", "p99_over_p50")}
    assert all(name.startswith("openai.serve.W7c.c2.ceiling.") for name in emitted(load, *CEILING, *few))


@pytest.mark.parametrize(("workload", "least", "requests"), [("W7b", 20, 225), ("W7b", 300, 325), ("W4b", 20, 75)])
def test_few_callers_of_long_answers_have_the_time_to_spread(workload, least, requests, monkeypatch):
    driven = mock.Mock(return_value=mock.Mock(notes={}))
    monkeypatch.setattr(measuring, "drive", driven)
    measuring.take(mock.Mock(workload=WORKLOADS[workload], seed=7), 1, least=least)
    assert driven.call_args.args[1:3] == (10, requests)


def test_a_sweep_is_one_figure(emitted):
    values = ["--sweep", "length", "--values", "1", "3", "--concurrency", "2", "--least", "10"]
    figures = emitted(load, *CEILING, *values)
    (figure,) = figures.values()
    assert figure["metric"] == "openai.sweep.length.W1.ceiling.tok_s"
    assert [point["length"] for point in figure["points"]] == [1, 3]
    assert figure["value"] == max(point["tok_s"] for point in figure["points"])
    assert all(point["ttft_p50_ms"] > 0 for point in figure["points"])  # sweeps are streamed


def test_the_mix_is_searched_and_then_taken_at_four_fifths(emitted, monkeypatch):
    seeds = []

    def answered(asker: Any, due: Any, processes: int) -> list[Outcome]:
        seeds.append(asker.seed)
        seconds = 1.0 if len(due) < 1200 else 3.0  # in 10 s
        return [Outcome(at, each.name, 0.002, Answered(at + seconds, seconds, None, 4, 1)) for at, each in due]

    monkeypatch.setattr(open_loop, "run", answered)
    figures = emitted(load, *CEILING, "--mix", "--rate", "100", "--seconds", "10", "--label", "fp8")
    highest, at_share = figures.values()
    assert highest["metric"] == "openai.open_loop.mix.fp8.req_s" and 110 < highest["value"] < 125
    assert at_share["metric"] == "openai.open_loop.mix.fp8.p99_ms" and at_share["value"] == 1000.0
    assert at_share["rate"] == pytest.approx(0.8 * highest["value"], abs=0.02)
    assert (at_share["late_p99_ms"], at_share["ci95"], at_share["failed"]) == (2.0, 0.0, 0)
    assert set(at_share["kinds"]) == {"short", "long_prompt", "long_answer"}
    assert len(highest["trials"]) == len(seeds) - 1 and len(set(seeds)) == len(seeds)  # never the same pictures


def test_another_server_is_named_by_its_address(monkeypatch):
    for url in ("http://host:8000", "http://host:8000/v1", "http://host:8000/v1/", "host:8000"):
        assert load.authority(url) == "host:8000"
    with pytest.raises(SystemExit, match="expected http://HOST:PORT"):
        load.authority("https://host")
    monkeypatch.setattr("sys.argv", ["load.py", "--target", "openai"])
    with pytest.raises(SystemExit, match="wants the server's --url"):
        load.main()
