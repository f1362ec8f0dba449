"""Requests come when they are due, and their time counts from there; what a run and a search make of it."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, stdev
from types import SimpleNamespace

import closed_loop
import open_loop
import pytest
import standin_server
from closed_loop import Answered, Reply
from gateway.gateway_doubles import listening
from open_loop import LONG_ANSWER, LONG_PROMPT, SHORT, Arrival, Counted, Outcome
from targets import Asker, OpenAiAsker
from workloads import PROMPT, Workload


def test_arrivals_are_a_poisson_process_of_the_rate():
    due = open_loop.arrivals(50.0, 200.0, seed=1)
    gaps = [later.at - sooner.at for sooner, later in pairwise(due)]
    assert due[-1].at < 200 and len(due) == pytest.approx(10_000, rel=0.03)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(1.0, rel=0.03)  # as exponential gaps have it
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)


def test_a_seed_gives_the_same_requests_at_any_rate():
    slow, fast = open_loop.arrivals(10.0, 60.0, seed=3), open_loop.arrivals(20.0, 30.0, seed=3)
    assert [each.workload for each in slow] == [each.workload for each in fast]
    assert [each.at for each in slow] == pytest.approx([2 * each.at for each in fast])
    assert open_loop.arrivals(10.0, 60.0, seed=4) != slow == open_loop.arrivals(10.0, 60.0, seed=3)


def test_the_mix_is_98_short_answers_one_long_prompt_and_one_long_answer():
    mix = Counter(each.workload.name for each in open_loop.arrivals(100.0, 100.0, seed=2)[:1000])
    assert mix == {"short": 980, "long_prompt": 10, "long_answer": 10}
    assert [workload.tokens for workload in SHORT] == [1, 2, 3, 4, 5]
    assert (LONG_ANSWER.tokens, LONG_ANSWER.streamed) == (256, True)
    (prompt,) = LONG_PROMPT.prompts
    assert prompt.endswith(PROMPT) and len(prompt.split()) > 1000


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (open_loop, closed_loop):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class AtOnce:
    """A pool whose only thread is the caller's: what it does keeps the next request from being sent."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function, *arguments):
        result = function(*arguments)
        return SimpleNamespace(result=lambda: result)


class Slow(Asker):
    """Takes three seconds, and refuses long answers."""

    clock: Clock

    @contextmanager
    def connection(self):
        def ask(picture: bytes, workload: Workload, prompt: str) -> Reply:
            self.clock.sleep(3.0)
            if workload is LONG_ANSWER:
                raise ConnectionError("overloaded")
            return Reply(None, workload.tokens)

        yield ask


def test_a_requests_time_counts_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_loop, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(Slow, "clock", Clock(monkeypatch), raising=False)
    due = [Arrival(1.0, SHORT[3]), Arrival(2.0, SHORT[0]), Arrival(3.0, LONG_ANSWER), Arrival(20.0, LONG_PROMPT)]
    part = open_loop.Part(0, Slow([], Workload("small", 32, 32, tokens=1, concurrency=1), 7), due)
    outcomes = part.run(SimpleNamespace(wait=lambda seconds: None))
    # The second and the third were sent late, for the ones before them held up the only thread: that is in their time.
    assert [(outcome.kind, outcome.late) for outcome in outcomes] == [
        *(("short", 0.0), ("short", 2.0), ("long_answer", 4.0), ("long_prompt", 0.0)),
    ]
    assert [outcome.answered and outcome.answered.seconds for outcome in outcomes] == [3.0, 5.0, None, 3.0]
    assert [outcome.answered and outcome.answered.tokens for outcome in outcomes] == [4, 1, None, 4]
    assert outcomes[2].error == "ConnectionError: overloaded"


def test_an_open_loop_over_processes_asks_all_in_their_order():
    due = [Arrival(number / 1000, (*SHORT, LONG_PROMPT, LONG_ANSWER)[number % 7]) for number in range(21)]
    small = Workload("small", 32, 32, tokens=1, concurrency=1)
    with listening(standin_server.openai_app) as address:
        outcomes = open_loop.run(OpenAiAsker([address.removeprefix("http://")], small, 7), due, processes=2)
    assert [(outcome.at, outcome.kind) for outcome in outcomes] == [(each.at, each.workload.name) for each in due]
    tokens = [outcome.answered and outcome.answered.tokens for outcome in outcomes]
    assert tokens == [1, 2, 3, 4, 5, 4, 256] * 3
    assert all(outcome.late >= 0 for outcome in outcomes)


def outcome(at: float, seconds: float, kind: str = "short", late: float = 0.001) -> Outcome:
    return Outcome(at, kind, late, Answered(100 + at + seconds, seconds, None, 4, 1))


def test_a_run_counts_what_was_due_after_its_warm_up():
    short = [outcome(number / 10, 0.5 + (number % 40) / 1000, late=number / 1e5) for number in range(1000)]
    warm_up = [outcome(number / 10 + 0.01, 9.0, late=9.0) for number in range(199)]
    long = [outcome(50.03, 4.0, "long_answer"), outcome(60.03, 8.0, "long_answer")]
    run = open_loop.count(10.0, 100.0, [*long, *warm_up, *short])
    assert (run.rate, run.requests) == (10.0, 802)
    assert (run.p50, run.p99) == (0.52, 0.539) and run.windows == (0.539,) * 5
    assert (run.late_p99, run.late_most) == (pytest.approx(0.00991), 0.00999)
    assert run.kinds["long_answer"] == {"answers": 2, "p50_ms": 8000.0, "p99_ms": 8000.0, "most_ms": 8000.0}
    assert run.kinds["short"]["answers"] == 800 and run.errors == ()
    assert run.notes["p99_ms"] == 539.0


def test_a_run_in_which_one_failed_keeps_no_limit():
    answered = [outcome(number / 10, 0.5) for number in range(1000)]
    # Also in the warm-up; and a failed one is no short time.
    run = open_loop.count(10.0, 100.0, [Outcome(0.05, "short", 0.0, None, "overloaded"), *answered])
    assert run.p99 == float("inf") and run.notes["p99_ms"] is None and run.errors == ("overloaded",)
    with pytest.raises(ValueError, match="no short answer was due"):
        open_loop.count(10.0, 100.0, [outcome(50.0, 1.0, "long_answer")])


class Server:
    """Answers in a second up to some rate."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.asked: list[float] = []

    def trial(self, rate: float) -> Counted:
        self.asked.append(rate)
        p99 = 1.0 if rate <= self.most else 2.5
        return Counted(rate, 100, 0.5, p99, (p99,) * 5, 0.001, 0.002, {}, ())


@pytest.mark.parametrize("guess", [60.0, 100.0, 130.0, 200.0])
def test_a_search_ends_close_below_the_highest_rate(guess: float):
    server = Server(most=117.0)
    best = open_loop.highest(server.trial, guess, trials=9)
    assert 117.0 / open_loop.CLOSE <= best.rate <= 117.0
    assert len(server.asked) <= 8 and len(set(server.asked)) == len(server.asked)


def test_a_search_that_found_no_limit_says_so():
    with pytest.raises(RuntimeError, match="no rate down to 102 requests"):
        open_loop.highest(Server(most=1.0).trial, 200.0, trials=4)
    with pytest.raises(RuntimeError, match="all rates up to 156 requests a second kept p99 within 2 s: begin higher"):
        open_loop.highest(Server(most=1e9).trial, 100.0, trials=3)
