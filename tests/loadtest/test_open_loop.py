"""Requests come when they are due, and their time counts from there; what a run and a search make of it."""

import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, stdev
from types import SimpleNamespace

import open_loop
import pytest
import standin_server
from closed_loop import Answered, Reply
from gateway.gateway_doubles import listening
from open_loop import LONG_ANSWER, LONG_PROMPT, SHORT, Arrival, Counted, Outcome
from targets import Asker, OpenAiAsker
from workloads import PROMPT, Workload


def test_arrivals_are_a_poisson_process_of_a_mix_that_is_the_same_at_any_rate():
    due, slow = open_loop.arrivals(50.0, 200.0, seed=1), open_loop.arrivals(25.0, 400.0, seed=1)
    assert due != open_loop.arrivals(50.0, 200.0, seed=2) and due == open_loop.arrivals(50.0, 200.0, seed=1)
    assert [each.workload for each in slow] == [each.workload for each in due]
    assert [each.at for each in slow] == pytest.approx([2 * each.at for each in due])
    gaps = [later.at - sooner.at for sooner, later in pairwise(due)]
    assert due[-1].at < 200 and len(due) == pytest.approx(10_000, rel=0.03)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(1.0, rel=0.03)  # as exponential gaps have it
    assert Counter(each.workload.name for each in due[:1000]) == {"short": 980, "long_prompt": 10, "long_answer": 10}
    (prompt,) = LONG_PROMPT.prompts
    assert prompt.endswith(PROMPT) and len(prompt.split()) > 1000


class Slow(Asker):
    """Takes its time, and refuses long answers."""

    @contextmanager
    def connection(self):
        def ask(picture: bytes, workload: Workload, prompt: str) -> Reply:
            time.sleep(0.05)
            if workload is LONG_ANSWER:
                raise ConnectionError("overloaded")
            return Reply(None, workload.tokens)

        yield ask


def test_a_requests_time_counts_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(open_loop, "CALLERS", 1)
    due = [Arrival(0.0, SHORT[3]), Arrival(0.0, SHORT[0]), Arrival(0.0, LONG_ANSWER), Arrival(0.0, LONG_PROMPT)]
    slow = Slow([], Workload("small", 32, 32, tokens=1, concurrency=1), 7)
    outcomes = open_loop.send_all(0, slow, due, SimpleNamespace(wait=lambda seconds: None))
    # All but the first were sent late, for the ones before them held up the only thread: that is in their time.
    assert all(outcome.late >= 0.05 * place for place, outcome in enumerate(outcomes))
    answered = [outcome.answered for outcome in outcomes]
    assert all(each.seconds >= 0.05 * (place + 1) for place, each in enumerate(answered) if each)
    assert [each and each.tokens for each in answered] == [4, 1, None, 4]
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
