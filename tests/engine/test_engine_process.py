"""The engine in a process of its own answers, refuses and ends as one in a plain loop; a death is noticed."""

import os
import signal
import threading
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import TextEngine, run
from engine_fakes import make_engine as fake_engine
from engine_fakes import make_request as fake_request
from fakes.backend import wait_until
from hypothesis import given
from hypothesis import strategies as st

from tessera.engine.engine import Engine
from tessera.engine.process import messages
from tessera.engine.process.client import EngineProcess
from tessera.engine.process.embedding_pool import Places
from tessera.engine.process.main import EngineServer
from tessera.engine.sequence import Request
from tessera.errors import CheckpointError, InvalidRequest, Unavailable
from tessera.prompt.sampling import SamplingParameters
from tessera.settings.stages import EngineConfig

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "default_model" / "checkpoint"
CONFIG = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24, max_batched_tokens=512, max_sequences=4, max_in_flight=4)
PATIENCE_S = 30


class Ends:
    """Collects events; lets a test wait for requests to end."""

    def __init__(self):
        self.events = []
        self._changed = threading.Condition()

    def __call__(self, event):
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, request):
        return [event for event in self.events if event.request is request]

    def wait(self, request, for_the_end=True):
        with self._changed:
            told = lambda: any(e.finish_reason or not for_the_end for e in self.of(request))  # noqa: E731
            assert self._changed.wait_for(told, PATIENCE_S)
        return self.of(request)


def refused(events, kind, words):
    """That all these came to is a refusal."""
    assert type(events[-1].refusal) is kind and words in str(events[-1].refusal)
    assert [event.finish_reason for event in events][-1] == "refused"


def asked(process, ends, *arguments, **sampling):
    """A request that was handed over; ``rows`` of a picture."""
    request = make_request(*arguments, **sampling)
    process.submit(request, ends, picture_rows(sampling.get("rows", 0)))
    return request


def make_request(name, length=20, rows=0, **sampling):
    return Request(
        name,
        np.arange(7, 7 + length, dtype=np.int32),
        np.array([[2, rows]] if rows else [], np.int32).reshape(-1, 2),
        None,
        np.array([rows, 1] if rows else [], np.int64),
        SamplingParameters.parse(dict(max_tokens=6, ignore_eos=True) | sampling),
    )


def picture_rows(rows):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16() if rows else None


@pytest.fixture(scope="module")
def parts():
    ends, died = Ends(), threading.Event()
    process = EngineProcess(CHECKPOINT, CONFIG, died.set)
    yield process, ends
    process.stop()
    assert not died.is_set()


def test_the_same_answers_as_in_one_loop(parts):
    process, ends = parts
    engine = TextEngine.from_checkpoint(CHECKPOINT, CONFIG)
    stop = {"stop": "e", "max_tokens": 200}
    ends_itself = {"ignore_eos": False}
    bound = {"json_object": True, "temperature": 1, "seed": 1, **ends_itself}
    for sampling in ({}, {"logprobs": 1}, {"choices": ["yes", "no"], **ends_itself}, stop, bound):
        for rows in (0, 9):
            ours, theirs = make_request("a", rows=rows, **sampling), make_request("a", rows=rows, **sampling)
            process.submit(ours, ends, picture_rows(rows))
            engine.submit(replace(theirs, embeddings=picture_rows(rows)))
            found, expected = ends.wait(ours), run(engine)
            assert [t for e in found for t in e.token_ids] == [t for e in expected for t in e.token_ids]
            assert "".join(e.text for e in found) == "".join(e.text for e in expected)
            assert (found[-1].finish_reason, found[-1].usage) == (expected[-1].finish_reason, expected[-1].usage)
            assert found[-1].choices == expected[-1].choices
            assert [entry["token_id"] for e in found for entry in e.logprobs or []] == [
                entry["token_id"] for e in expected for entry in e.logprobs or []
            ]


def test_refusals_and_cancelling(parts):
    process, ends = parts
    refused(ends.wait(asked(process, ends, "long", max_tokens=10**6)), InvalidRequest, "exceed the context")
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    tried, given_up = (asked(process, ends, name, json_schema=endless, ignore_eos=False) for name in ("tried", "not"))
    process.cancel(given_up.number)
    assert ends.wait(asked(process, ends, "plain"))[-1].finish_reason == "length"
    assert ends.wait(given_up)[-1].finish_reason == "cancelled"
    assert not ends.of(tried)  # trying holds up nobody
    refused(ends.wait(tried), InvalidRequest, "json_schema is too complex")  # it would listen to nobody for minutes
    running = [asked(process, ends, f"{n}", rows=9, max_tokens=3000) for n in range(4)]
    refused(ends.wait(asked(process, ends, "one too many", rows=9)), Unavailable, "4 requests are in flight")
    assert process._rows.keys() == {request.number for request in running}
    assert process._answers.numbers_of("one too many") == []
    for request in running:
        process.cancel(request.number)
    assert [ends.wait(request)[-1].finish_reason for request in running] == ["cancelled"] * 4
    process.cancel(running[0].number)  # too late does no harm
    assert ends.wait(asked(process, ends, "last"))[-1].finish_reason == "length"
    assert process.counts()["kv_blocks_total"] > 0


def test_a_missing_checkpoint_is_told_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        EngineProcess(tmp_path, CONFIG, lambda: None)


def test_a_death_is_noticed_and_nobody_waits_forever():
    ends, died = Ends(), threading.Event()
    process = EngineProcess(CHECKPOINT, CONFIG, died.set)
    under_way = asked(process, ends, "under way", max_tokens=3000)
    ends.wait(under_way, for_the_end=False)
    os.kill(process._process.pid, signal.SIGSTOP)
    sent = asked(process, ends, "sent and not taken", rows=9)
    os.kill(process._process.pid, signal.SIGKILL)
    assert died.wait(PATIENCE_S)
    for request in (under_way, sent, asked(process, ends, "late")):
        refused(ends.wait(request), Unavailable, "gone")
    assert not process._rows
    process.stop()


CAPACITY = 1 << 14


@given(st.lists(st.one_of(st.integers(0, 5000), st.just(None)), max_size=60), st.randoms(use_true_random=False))
def test_places_never_overlap_and_are_exact(steps, random):
    places, taken = Places(CAPACITY), {}
    for size in steps:
        if size is not None:
            start = places.take(size)
            if start is None:
                continue
            assert start + size <= CAPACITY
            assert all(start >= other + length or start + size <= other for other, length in taken.items())
            assert start not in taken
            taken[start] = size
        elif taken:
            start = random.choice(sorted(taken))
            del taken[start]
            places.give_back(start)
        assert places.used >= sum(taken.values())
    for start in taken:
        places.give_back(start)
    assert places.used == 0
    assert places.most_used <= CAPACITY
    assert places.take(CAPACITY) == 0 and places.most_used == CAPACITY and places.take(1) is None
    with pytest.raises(AssertionError, match="byte 256"):
        places.give_back(256)


class Stage:
    """A server of an engine without a model, on a thread, and the stage's end of its connection."""

    def __init__(self):
        engine, self.runner = fake_engine()
        engine.__class__ = Engine  # which tells progress instead of text
        self.engine, self._ended = engine, {}
        self._connection, theirs = Pipe()
        self._wire = messages.Wire(self._connection)
        self.server = EngineServer(messages.Wire(theirs), engine, None)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()

    def ask(self, **sampling):
        request = fake_request([1], **(dict(max_tokens=3, ignore_eos=True) | sampling))
        self._wire.send(messages.Submit(request, None))
        return request.number

    def end(self, number):
        """Nothing is told of a request after its end."""
        while number not in self._ended:
            assert self._connection.poll(PATIENCE_S)
            ends = {end.number: end for end in self._wire.receive().ends}
            assert not self._ended.keys() & ends.keys()
            self._ended |= ends
        return self._ended[number]

    def stop(self):
        self._wire.send(messages.Stop())

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr("tessera.engine.process.main._IDLE_SECONDS", 0.01)
    stage = Stage()
    yield stage
    stage.stop()
    stage.join()


def test_a_failing_step_ends_its_requests_and_the_next_ones_work(stage, caplog):
    works = stage.runner.run
    stage.runner.run = lambda batch: 1 // 0
    end = stage.end(stage.ask())
    assert end.reason == "error" and "a step failed" in end.error and "zero" not in end.error
    assert "ZeroDivisionError" in caplog.text
    stage.runner.run = works
    assert stage.end(stage.ask()).reason == "length"


def test_leaked_blocks_are_found_when_idle(stage):
    assert stage.end(stage.ask()).reason == "length"
    stage.engine.scheduler.blocks._holders[3] = 1
    stage.ask()  # so that it looks again
    wait_until(lambda: not stage.engine.scheduler.blocks._holders[3])
    assert stage.end(stage.ask()).reason == "length"


def test_stopping_ends_what_runs_and_refuses_more(stage):
    stepping, go_on, works = threading.Event(), threading.Event(), stage.runner.run

    def slow(batch):
        stepping.set()
        assert go_on.wait(PATIENCE_S)
        return works(batch)

    stage.runner.run = slow
    number = stage.ask(max_tokens=50)
    assert stepping.wait(PATIENCE_S)
    stage.stop()
    wait_until(lambda: stage.server._stopping)
    go_on.set()
    assert stage.end(number).reason == "error"
    stage.join()
    with pytest.raises(Unavailable, match="stopping"):
        stage.engine.submit(fake_request([1]))
