"""The engine in a process of its own answers, refuses and ends as one in a plain loop; a death is noticed."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import TextEngine, run

from tessera.engine.process.client import EngineProcess
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

    def wait(self, request):
        with self._changed:
            assert self._changed.wait_for(lambda: any(e.finish_reason for e in self.of(request)), PATIENCE_S)
        return self.of(request)


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
    with pytest.raises(InvalidRequest, match="exceed the context"):
        process.submit(make_request("long", max_tokens=10**6), ends).result(PATIENCE_S)
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    with pytest.raises(InvalidRequest, match="json_schema is too complex"):  # it would listen to nobody for minutes
        process.submit(make_request("endless", json_schema=endless, ignore_eos=False), ends).result(PATIENCE_S)
    running = [make_request(f"{n}", rows=9, max_tokens=3000) for n in range(4)]
    for request in running:
        process.submit(request, ends, picture_rows(9))
    with pytest.raises(Unavailable, match="4 requests are in flight"):
        process.submit(make_request("one too many", rows=9), ends, picture_rows(9)).result(PATIENCE_S)
    assert process._rows.keys() == {request.number for request in running}
    assert process._answers.numbers_of("one too many") == []
    for request in running:
        process.cancel(request.number)
    assert [ends.wait(request)[-1].finish_reason for request in running] == ["cancelled"] * 4
    process.cancel(running[0].number)  # too late does no harm
    last = make_request("last")
    process.submit(last, ends)
    assert ends.wait(last)[-1].finish_reason == "length"
    assert process.counts()["kv_blocks_total"] > 0


def test_a_grammar_that_takes_long_to_try_holds_up_nobody(parts):
    process, ends = parts
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 29)]}
    tried = make_request("endless", json_schema=endless, ignore_eos=False)
    refused = process.submit(tried, ends)
    given_up = make_request("given up", json_schema=endless, ignore_eos=False)
    process.submit(given_up, ends)
    process.cancel(given_up.number)
    plain = make_request("plain")
    process.submit(plain, ends).result(PATIENCE_S)
    assert ends.wait(plain)[-1].finish_reason == "length" and not refused.done()
    assert ends.wait(given_up)[-1].finish_reason == "cancelled" and not refused.done()
    with pytest.raises(InvalidRequest, match="json_schema is too complex"):
        refused.result(PATIENCE_S)


def test_nobody_waits_until_a_request_is_taken_and_events_may_come_before(parts):
    """As they do where a request ends at once: here the word that it was taken is held back."""
    process, ends = parts
    request = make_request("early")
    settle, held_back = process._settle, []
    process._settle = lambda *word: held_back.append(word)
    try:
        taken = process.submit(request, ends)
        assert ends.wait(request)[-1].finish_reason == "length" and not taken.done()
    finally:
        process._settle = settle
    settle(*held_back[0])
    assert taken.result(0) is None
    again = make_request("again")
    process.submit(again, ends).result(PATIENCE_S)
    assert ends.wait(again)[-1].finish_reason == "length"


def test_a_missing_checkpoint_is_told_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        EngineProcess(tmp_path, CONFIG, lambda: None)


def test_a_death_is_noticed_and_nobody_waits_forever():
    ends, died = Ends(), threading.Event()
    process = EngineProcess(CHECKPOINT, CONFIG, died.set)
    process.submit(make_request("under way", max_tokens=3000), ends).result(PATIENCE_S)
    os.kill(process._process.pid, signal.SIGSTOP)
    sent = process.submit(make_request("sent and not taken"), ends)
    os.kill(process._process.pid, signal.SIGKILL)
    assert died.wait(PATIENCE_S)
    with pytest.raises(Unavailable, match="gone"):
        sent.result(PATIENCE_S)
    with pytest.raises(Unavailable, match="gone"):
        process.submit(make_request("late"), ends).result(PATIENCE_S)
    process.stop()
