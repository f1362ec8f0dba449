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
    tried = asked(process, ends, "endless", json_schema=endless, ignore_eos=False)
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


def test_a_grammar_that_takes_long_to_try_holds_up_nobody(parts):
    process, ends = parts
    endless = {"allOf": [{"type": "integer", "multipleOf": n} for n in (2, 3, 5, 7, 11, 13, 17, 19, 29)]}
    tried = asked(process, ends, "endless", json_schema=endless, ignore_eos=False)
    given_up = asked(process, ends, "given up", json_schema=endless, ignore_eos=False)
    process.cancel(given_up.number)
    assert ends.wait(asked(process, ends, "plain"))[-1].finish_reason == "length" and not ends.of(tried)
    assert ends.wait(given_up)[-1].finish_reason == "cancelled" and not ends.of(tried)
    refused(ends.wait(tried), InvalidRequest, "json_schema is too complex")


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
