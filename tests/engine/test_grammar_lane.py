"""Grammars that take long to compile or to follow hold up nobody else."""

import itertools
import queue
import re
import threading
import time

import pytest
from engine_fakes import EOS, VOCABULARY, ByteTokenizer, ends, make_engine, make_request, run, text_of

from tessera.engine.process.messages import Submit
from tessera.engine.scheduling.scheduler import Scheduler
from tessera.engine.structured_output import compiling, constraints, sequences
from tessera.engine.structured_output.compiling import MOST_GRAMMARS, GrammarLane, GrammarTrial
from tessera.engine.structured_output.constraints import Constraints, Matcher
from tessera.errors import InvalidRequest, Unavailable
from tessera.prompt.sampling import SamplingParameters

PATIENCE_S = 30


@pytest.fixture
def slow(monkeypatch):
    """Every grammar is followed in the lane."""
    monkeypatch.setattr(constraints, "_MOST_BEYOND_S", -1.0)


def bound(count):
    return [make_request([n, 5], f"bound {n}", max_tokens=60, regex=f"(ab|cd){{{6 + n}}}") for n in range(count)]


def test_slow_ones_answer_as_quick_ones_a_few_at_a_time(monkeypatch):
    """Where blocks are few, and they are preempted while their masks are made."""
    quick, _ = make_engine(num_blocks=200)
    jobs = bound(6)
    for job in jobs:
        quick.submit(job)
    expected = run(quick)
    monkeypatch.setattr(constraints, "_MOST_BEYOND_S", -1.0)
    engine, _ = make_engine(num_blocks=16, max_sequences=8)
    for job in jobs:
        engine.submit(job)
    events = run(engine, 20_000)
    for n, job in enumerate(jobs):
        assert text_of(events, job.request_id) == text_of(expected, job.request_id)
        assert re.fullmatch(f"(ab|cd){{{6 + n}}}", text_of(events, job.request_id))
    assert not engine._lane and not engine.scheduler.parked


def test_plain_answers_go_on_while_no_mask_comes(slow, monkeypatch):
    monkeypatch.setattr(sequences, "MOST_OUTSIDE", 3)
    engine, _ = make_engine(num_blocks=200, max_sequences=4)
    held = []
    monkeypatch.setattr(engine._lane, "run", held.append)
    for job in bound(4):
        engine.submit(job)
    with pytest.raises(Unavailable, match="the queue is full of answers whose grammars take long"):
        engine.submit(make_request([9], "one more", regex="x{9}"))
    for n in range(9):
        engine.submit(make_request([n], f"plain {n}", max_tokens=12, ignore_eos=True))
    events = []
    while sum(name.startswith("plain") for name in ends(events)) < 9:
        events += engine.step()
        engine.scheduler.check()
    assert set(ends(events).values()) == {"length"} and len(held) == 1
    assert len(engine.scheduler.parked) == 3
    engine.cancel(engine.scheduler.parked[0].request.number)
    assert list(ends(engine.step()).values()) == ["cancelled"]
    monkeypatch.undo()
    held.pop()()
    assert list(ends(run(engine, 20_000)).values()) == ["stop"] * 3


@pytest.mark.parametrize(
    ("count", "beside", "async_launch"), [(20, False, False), (20, False, True), (21, True, False), (21, True, True)]
)
def test_the_masks_of_many_are_made_beside_the_steps(monkeypatch, count, beside, async_launch):
    """Where steps are planned ahead. What each takes is given, so that 20 hold up no step; a crowd needs no places
    in the lane."""
    monkeypatch.setattr(Scheduler, "tokens_should_be_known", lambda scheduler, batch: False)
    jobs = [make_request([n, 5], f"{n}", max_tokens=60, regex="(ab|cd){4}") for n in range(count)]
    few, _ = make_engine(num_blocks=4000, max_sequences=8)
    expected = [text for job in jobs for text in [few.submit(job) and text_of(run(few), job.request_id)]]
    monkeypatch.setattr(constraints._Grammar, "computed", lambda known, seconds: setattr(known, "mean", 0.0001))
    threads, advance = [], Matcher.advance

    def seen(matcher, token):
        threads.append(threading.get_ident())
        advance(matcher, token)

    monkeypatch.setattr(Matcher, "advance", seen)
    engine, _ = make_engine(num_blocks=4000, max_sequences=24, max_batched_tokens=512, async_launch=async_launch)
    sequences = [engine.submit(job) for job in jobs]  # they count for as long as they are held
    events = []
    while engine.has_work():
        events += engine.step()
        engine.scheduler.check()
        assert not engine.scheduler.parked
    assert [text_of(events, job.request_id) for job in jobs] == expected
    assert len(set(threads)) == 1 and (threads[0] != threading.get_ident()) is beside
    assert {sequence.finish_reason for sequence in sequences} == {"stop"} and not engine._lane._answers


@pytest.mark.parametrize(
    ("kind", "slow"),
    [
        pytest.param([(0.01, 0.000013)] * 20, False, id="a CPU clock that counts whole ticks"),
        pytest.param([*[(0.04, 0.05)], *[(0.0001, 0.0001)] * 40, (0.04, 0.04)], False, id="the CPU taken away"),
        pytest.param([(0.0001, 0.3)] * 20, False, id="another thread on the CPU"),
        pytest.param([(0.004, 0.004)] * 2, True, id="slow"),
        pytest.param([(0.00046, 0.00046)] * 24, True, id="somewhat slow for long"),
    ],
)
def test_a_grammar_is_slow_by_what_several_masks_took(monkeypatch, kind, slow):
    """``kind``: seconds of each mask after the first by the thread's CPU clock, and as they pass."""
    matcher = Constraints(ByteTokenizer(), VOCABULARY, (EOS,)).matcher(SamplingParameters.parse({"regex": "a{200}"}))
    matcher._grammar.beyond = 0.0  # of the first, which was really made
    for clock in (0, 1):
        readings = [second for seconds in kind for second in (0.0, seconds[clock])]
        monkeypatch.setattr(time, ("thread_time", "perf_counter")[clock], iter(readings).__next__)
    for _ in kind:
        assert not matcher.slow
        matcher.advance(ord("a"))
        assert matcher.mask.any()
    monkeypatch.undo()
    assert matcher.slow is slow


def test_a_grammar_that_is_slow_to_begin_is_slow_from_there(monkeypatch):
    matcher = Constraints(ByteTokenizer(), VOCABULARY, (EOS,)).matcher
    monkeypatch.setattr(time, "thread_time", itertools.count(0, 0.3).__next__)
    monkeypatch.setattr(time, "perf_counter", itertools.count(0, 0.3).__next__)
    assert matcher(SamplingParameters.parse({"regex": "a{200}"})).slow


class Lane:
    """A lane before constraints of its own, whose grammars are compiled when the test says so."""

    def __init__(self, monkeypatch):
        self.compiled, self.go_on, self.said = [], threading.Semaphore(0), queue.SimpleQueue()
        self._known = set()
        monkeypatch.setattr(compiling.GrammarTrial, "check", lambda _, sampling: self._try(sampling.regex))
        self.lane = GrammarLane(
            self,
            lambda message: self.said.put((message.request.request_id, "submitted")),
            lambda progress: self.said.put(
                (self.names[progress.ends[0].number], str(progress.ends[0].refusal or progress.ends[0].reason))
            ),
        )
        self.names = {}

    def has(self, sampling):
        return sampling.regex in self._known

    def compile(self, sampling, size):
        self.compiled.append(sampling.regex)
        self._known.add(sampling.regex)

    def put(self, name, regex, **options):
        request = make_request([1], name, regex=regex)
        for option, value in options.items():
            object.__setattr__(request, option, value)
        self.names[request.number] = name
        self.lane.put(Submit(request, None))
        return request.number

    def hear(self):
        return self.said.get(timeout=PATIENCE_S)

    def _try(self, regex):
        assert self.go_on.acquire(timeout=PATIENCE_S)
        if regex == "bad":
            raise InvalidRequest("it is bad")
        return 1


def test_a_grammar_is_compiled_once_for_all_who_wait_for_it(monkeypatch):
    lane = Lane(monkeypatch)
    for n in range(40):
        lane.put(f"{n}", "a" if n % 2 else "bad")
    lane.put("late", "a", deadline_ns=1)
    cancelled = lane.put("cancelled", "a")
    assert lane.lane.cancel(cancelled, "cancelled") and not lane.lane.cancel(cancelled, "cancelled")
    assert lane.hear() == ("cancelled", "cancelled")
    lane.go_on.release(2)
    heard = [lane.hear() for _ in range(41)]
    assert dict(heard[:20]) == {f"{n}": "it is bad" for n in range(0, 40, 2)}
    assert heard[20:40] == [(f"{n}", "submitted") for n in range(1, 40, 2)]
    assert heard[40:] == [("late", "deadline")]
    assert lane.compiled == ["a"]


def test_a_fault_on_the_way_to_the_engine_leaves_nobody_waiting(monkeypatch, caplog):
    lane = Lane(monkeypatch)
    hand_on, faults = lane.lane._submit, iter([OSError("broken")])
    monkeypatch.setattr(lane.lane, "_submit", lambda message: next(map(fail, faults), None) or hand_on(message))
    for name in ("first", "second"):
        lane.put(name, "a")
    lane.go_on.release()
    assert {lane.hear()[0] for _ in range(2)} == {"first", "second"} and "handed on" in caplog.text
    lane.put("third", "a")
    assert lane.hear() == ("third", "submitted")


def fail(error):
    raise error


def test_only_so_many_grammars_wait(monkeypatch):
    lane = Lane(monkeypatch)
    for n in range(MOST_GRAMMARS):
        lane.put(f"{n}", f"a{n}")
    lane.put("again", "a0")
    with pytest.raises(Unavailable, match="the queue of grammars is full: 32 wait to be compiled; try again later"):
        lane.put("too many", "b")
    lane.go_on.release(MOST_GRAMMARS)
    assert {lane.hear()[1] for _ in range(MOST_GRAMMARS + 1)} == {"submitted"}
    assert len(lane.compiled) == MOST_GRAMMARS


# Each alone is quick; all together would take minutes.
LONG = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}


def parameters(**given):
    return SamplingParameters.parse(given)


def test_one_that_takes_too_long_is_refused_and_the_next_is_tried():
    trial = GrammarTrial()
    assert trial._process is None  # nobody has asked for one yet
    assert trial.check(parameters(regex="yes|no")) < trial.check(parameters(regex="a{19900}")) < 64 << 20
    first = trial._process
    with pytest.raises(InvalidRequest, match=r"regex: unclosed group \(character 1\)"):
        trial.check(parameters(regex="a(b"))
    assert trial._process is first
    with pytest.raises(InvalidRequest, match="json_schema is too complex: it takes more than 1 s"):
        trial.check(parameters(json_schema=LONG))
    assert trial._process is first  # only a child of its ended
    trial.check(parameters(json_schema={"type": "integer", "multipleOf": 23}))
    trial._process.kill()  # as the kernel does where memory is short
    trial._process.wait()
    trial.check(parameters(regex="yes|no", max_tokens=3))  # tried before
    assert trial._process.poll() is not None
    trial.check(parameters(json_object=True))
    trial._connection.close()
    assert trial._process.wait() == 0  # it ends with the stage
