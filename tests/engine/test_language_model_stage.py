"""What the stage tells a request that its engine refuses, or whose client has left, against a stand-in for both."""

from functools import partial
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fakes import ByteTokenizer
from fakes.backend import InferenceRequest, Tensor, strings

from tessera.engine.process.messages import End, Progress
from tessera.engine.rendering import Answers
from tessera.errors import InvalidRequest
from tessera.tritonserver.language_model import TritonPythonModel, Unsaid
from tessera.tritonserver.responder import Outbox


class Engine:
    """Takes requests and says nothing of them by itself."""

    def __init__(self):
        self.taken, self.cancelled = [], []

    def submit(self, request, deliver, rows):
        assert rows is None
        self.taken.append(partial(refuse, request, deliver))

    def cancel(self, number):
        self.cancelled.append(number)


def refuse(request, deliver, words):
    answers = Answers(ByteTokenizer(), cancel=None)
    answers.add(request, deliver)
    answers.take(Progress.refused(request.number, InvalidRequest(words)))


@pytest.fixture
def stage(backend):
    model = TritonPythonModel()
    model._engine, model._outbox, model._hidden, model._page = Engine(), Outbox("language_model", 2), 8, None
    model._device, model._full_cuts, model._unsaid = "cpu", None, Unsaid("")
    yield model
    model._outbox.close()


def question():
    ids, spans = Tensor("INPUT_IDS", np.arange(3, dtype=np.int32)), Tensor("SPANS", np.zeros((0, 2), np.int32))
    return InferenceRequest([ids, spans, strings("sampling_parameters", b'{"max_tokens": 2}')], "one")


def test_the_warm_up_has_a_tensor_for_an_answer_before_execute_returns(stage):
    request = InferenceRequest([strings("PING", b"")])
    stage.execute([request])
    (response,) = request.sender.responses
    assert request.sender.final and [tensor.name() for tensor in response.output_tensors()] == ["timings"]


def test_a_request_whose_client_has_left_is_cancelled_and_no_other(stage):
    left, stayed = question(), question()
    left.sender.cancelled = True
    stage.execute([left, stayed])
    stage._outbox.close()  # when all that was asked is told
    assert len(stage._engine.cancelled) == 1
    assert not left.sender.final and not stayed.sender.final  # the engine's last event ends them


def test_a_client_that_has_left_is_not_asked_after_a_refusal(stage):
    """Which would crash the server, as the stand-in's sender knows."""
    request = question()
    stage._engine.submit = lambda request, deliver, rows: refuse(request, deliver, "no")
    stage.execute([request])
    stage._outbox.close()
    assert request.sender.final and stage._engine.cancelled == []


def test_every_part_has_all_outputs_and_the_last_one_says_them(stage):
    stage._unsaid, stage._page, request = Unsaid("w.c.m.d"), SimpleNamespace(observe=lambda event: None), question()
    told = []
    stage._engine.submit = lambda request, deliver, rows: told.extend((request, deliver.args[0]))
    stage.execute([request])
    (asked, channel), events = told, []
    answers, number = Answers(ByteTokenizer(), cancel=None), told[0].number
    answers.add(asked, events.append)
    answers.take(Progress([(number, ord("a"), None)]))
    end = End(number, "length", cached_tokens=2, drafted_tokens=(4, 3))
    answers.take(Progress([(number, ord("b"), None)], [end]))
    for event in events:
        channel.deliver([event])
    parts = [part.output_tensors() for part in request.sender.responses]
    first, last = ({each.name(): each.as_numpy().tolist() for each in part} for part in parts)
    nothing = {"usage": [0, 0, 0], "cached_tokens": [0], "drafted_tokens": [0, 0], "timings": [0] * 6}
    nothing |= {name: [b""] for name in ("finish_reason", "logprobs", "choices", "cascade")}
    nothing["fingerprint"] = [b"w.c.m.d"]
    assert first == nothing | {"text_output": [b"a"]}
    said = {"finish_reason": [b"length"], "usage": [3, 2, 0], "cached_tokens": [2], "drafted_tokens": [4, 3]}
    assert last == nothing | said | {"text_output": [b"b"], "timings": last["timings"]} and any(last["timings"])


def test_no_two_threads_send_one_tensor(backend):
    """The first sending of one copies it without a lock."""
    unsaid, sent = Unsaid(""), []
    threads = [Thread(target=lambda: sent.append(unsaid.response([]).output_tensors())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    mine, again = (unsaid.response([]).output_tensors() for _ in range(2))
    assert mine == again and not set(sent[0]) & set(sent[1]) and not set(mine) & set(sent[0] + sent[1])
