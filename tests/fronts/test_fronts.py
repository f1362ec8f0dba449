"""The fronts against a stand-in for the ensemble."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, strings, wait_until

from tessera.tritonserver.fronts import Stream, Unary
from tessera_wire import errors
from tessera_wire.connection import Connection
from tessera_wire.tensors import Tensor as Sent
from tessera_wire.tensors import bytes_tensor, elements

BOTH = [(Unary, "vlm_unary"), (Stream, "vlm_stream")]
MESSAGES = Connection("127.0.0.1:9")._messages


def answer_of(text: str, reason: str = "", usage: tuple[int, ...] = (0, 0, 0)) -> Any:
    """A response of the ensemble."""
    message = MESSAGES.ModelInferResponse()
    for name, kind, shape, raw in (
        ("text_output", "BYTES", [1], bytes_tensor("", text.encode()).data),
        ("finish_reason", "BYTES", [1], bytes_tensor("", reason.encode()).data),
        ("usage", "INT32", [3], np.array(usage, np.int32).tobytes()),
        ("timings", "FP32", [2], np.array([0.5, 1.5], np.float32).tobytes()),
    ):
        message.outputs.add(name=name, datatype=kind, shape=shape)
        message.raw_output_contents.append(raw)
    return message


LAST = answer_of("b", "stop", (9, 2, 4))


class Ensemble:
    """A line that answers with what `answer` yields, an error at the end or none, and notes what it was asked."""

    def __init__(self, answer: Callable[[str], Iterable[Any]]) -> None:
        self.answer = answer
        self.requests: dict[str, dict[str, Sent]] = {}
        self.priorities: list[int] = []
        self.leases: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.threads: list[threading.Thread] = []

    def send(
        self, model: str, request_id: str, inputs: list[Sent], deliver: Callable[[Any], None], priority: int, lease: str
    ) -> None:
        assert model == "vlm"
        self.leases[lease] = request_id
        self.priorities.append(priority)
        self.requests[request_id] = {tensor.name: tensor for tensor in inputs}
        self.threads.append(threading.Thread(target=self.work, args=(request_id, deliver)))
        self.threads[-1].start()

    def work(self, request_id: str, deliver: Callable[[Any], None]) -> None:
        try:
            for message in self.answer(request_id):
                deliver(message)
        except errors.TesseraClientError as error:
            deliver(error)
        else:
            deliver(None)

    def cancel(self, lease: str) -> None:
        self.cancelled.append(self.leases[lease])

    def close(self, seconds: float) -> None:
        for thread in self.threads:
            thread.join()


def started(kind, name, ensemble, monkeypatch):
    front = kind()
    monkeypatch.setattr(front, "open_line", lambda address: ensemble)
    front.initialize({"model_name": name, "model_config": "{}", "model_repository": "/m"})
    return front


def outputs(response) -> dict[str, list]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def test_unary_asks_for_one_response_and_hands_all_of_it_on(backend, monkeypatch):
    ensemble = Ensemble(lambda _: [LAST])
    front = started(Unary, "vlm_unary", ensemble, monkeypatch)
    given = [
        strings("text_input", b"?"),
        strings("image", b"one", b"two"),
        strings("sampling_parameters", b'{"seed": 1, "priority": 7}'),
        Tensor("stream", np.array([True])),
        Tensor("exclude_input_in_output", np.array([True])),
    ]
    request = InferenceRequest(given, "mine")
    front.execute([request])
    front.finalize()
    assert set(ensemble.requests) == {"mine"}
    sent = ensemble.requests["mine"]
    assert set(sent) == {"text_input", "image", "sampling_parameters", "stream", "exclude_input_in_output"}
    assert list(elements(sent["image"].data)) == [b"one", b"two"] and sent["image"].shape == (2,)
    assert list(elements(sent["text_input"].data)) == [b"?"]
    assert list(elements(sent["sampling_parameters"].data)) == [b'{"seed": 1, "priority": 7}']
    assert ensemble.priorities == [7]
    assert sent["stream"] == Sent("stream", "BOOL", (1,), b"\0")
    assert sent["exclude_input_in_output"] == Sent("exclude_input_in_output", "BOOL", (1,), b"\1")
    (response,) = request.sender.responses
    assert request.sender.final
    assert outputs(response) == {
        "text_output": [b"b"],
        "finish_reason": [b"stop"],
        "usage": [9, 2, 4],
        "timings": [0.5, 1.5],
    }


def test_stream_relays_every_response_and_then_ends(backend, monkeypatch):
    ensemble = Ensemble(lambda _: [answer_of("a"), LAST])
    front = started(Stream, "vlm_stream", ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    first, last = (outputs(response) for response in request.sender.responses)
    assert first["text_output"] == [b"a"] and first["finish_reason"] == [b""] and first["usage"] == [0, 0, 0]
    assert last["text_output"] == [b"b"]
    assert request.sender.final
    assert next(iter(ensemble.requests.values()))["stream"].data == b"\1"


@pytest.mark.parametrize(("kind", "name"), BOTH)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("too many tiles"), "INVALID_ARG"),
        (errors.DeadlineExceeded("deadline exceeded after 5 ms"), "UNAVAILABLE"),
        (errors.ConnectionFailed("the server is stopping"), "UNAVAILABLE"),
        (errors.ProtocolError("no outputs"), "INTERNAL"),
    ],
)
def test_an_error_of_the_ensemble_reaches_the_client_once_with_its_code(backend, monkeypatch, kind, name, error, code):
    def fail(_):
        raise error
        yield

    front = started(kind, name, Ensemble(fail), monkeypatch)
    request = InferenceRequest([])
    front.execute([request])
    front.finalize()
    (response,) = request.sender.responses
    assert response.error().code() == code
    assert error.message in response.error().message()
    assert request.sender.final


def test_a_stream_that_breaks_after_its_first_part_is_not_begun_again(backend, monkeypatch):
    def answer(_):
        yield answer_of("a")
        raise errors.ConnectionFailed("the line broke")

    ensemble = Ensemble(answer)
    front = started(Stream, "vlm_stream", ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert len(ensemble.requests) == 1
    first, last = request.sender.responses
    assert outputs(first)["text_output"] == [b"a"] and last.error().code() == "UNAVAILABLE"


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_client_that_goes_away_cancels_its_request(backend, monkeypatch, kind, name):
    def working(_):
        wait_until(lambda: ensemble.cancelled)
        yield answer_of("", "cancelled")

    ensemble = Ensemble(working)
    front = started(kind, name, ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")], "theirs")
    request.sender.cancelled = True
    front.execute([request])
    wait_until(lambda: request.sender.final)
    front.finalize()
    assert ensemble.cancelled == ["theirs"]


def test_two_requests_under_one_id_are_told_apart(backend, monkeypatch):
    both = threading.Barrier(2)

    def answer(request_id):
        both.wait(5)
        yield answer_of(request_id, "stop")

    ensemble = Ensemble(answer)
    front = started(Unary, "vlm_unary", ensemble, monkeypatch)
    requests = [InferenceRequest([strings("text_input", b"?")], "same") for _ in range(2)]
    front.execute(requests)
    front.finalize()
    answered = [outputs(request.sender.responses[0])["text_output"][0].decode() for request in requests]
    assert len(set(answered)) == 2 and "same" in answered
    assert set(answered) == set(ensemble.requests)


@pytest.mark.parametrize(("kind", "name", "responses"), [(Unary, "vlm_unary", 1), (Stream, "vlm_stream", 0)])
def test_a_ping_is_answered_by_the_front_itself(backend, monkeypatch, kind, name, responses):
    ensemble = Ensemble(lambda _: [LAST])
    front = started(kind, name, ensemble, monkeypatch)
    request = InferenceRequest([strings("PING", b"?")])
    front.execute([request])
    front.finalize()
    assert request.sender.final
    assert len(request.sender.responses) == responses
    assert not ensemble.requests


def test_a_timeout_travels_in_the_sampling_parameters(backend, monkeypatch):
    ensemble = Ensemble(lambda _: [LAST])
    front = started(Unary, "vlm_unary", ensemble, monkeypatch)
    front.execute([InferenceRequest([strings("sampling_parameters", b'{"max_tokens": 3}')], timeout=500)])
    refused = InferenceRequest([strings("sampling_parameters", b"not json")], timeout=500)
    front.execute([refused])
    front.finalize()
    (sent,) = ensemble.requests.values()
    (sampling,) = elements(sent["sampling_parameters"].data)
    assert json.loads(sampling) == {"timeout_us": 500, "max_tokens": 3}
    (response,) = refused.sender.responses
    assert response.error().code() == "INVALID_ARG" and refused.sender.final
    assert "'sampling_parameters' is not valid JSON" in response.error().message()


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_request_parameters_travel_in_the_sampling_parameters(kind, name, backend, monkeypatch):
    ensemble = Ensemble(lambda _: [LAST])
    front = started(kind, name, ensemble, monkeypatch)
    parameters = '{"id": "7", "top_k": 5, "stream": false, "exclude_input_in_output": true, "timeout": 900}'
    front.execute([InferenceRequest([strings("sampling_parameters", b'{"max_tokens": 3}')], parameters=parameters)])
    front.finalize()
    (sent,) = ensemble.requests.values()
    (sampling,) = elements(sent["sampling_parameters"].data)
    assert json.loads(sampling) == {"max_tokens": 3, "top_k": 5, "timeout_us": 900}
    assert (sent["stream"].data, sent["exclude_input_in_output"].data) == (b"\0", b"\1")


def test_an_ensemble_without_an_answer_is_an_error_and_never_silence(backend, monkeypatch):
    front = started(Unary, "vlm_unary", Ensemble(lambda _: []), monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert "no answer" in request.sender.responses[0].error().message() and request.sender.final


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_an_answer_that_cannot_be_relayed_is_an_error(backend, monkeypatch, kind, name):
    broken = answer_of("a")
    broken.raw_output_contents[0] = b"\1"
    front = started(kind, name, Ensemble(lambda _: [broken]), monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert request.sender.responses[0].error().code() == "INTERNAL" and request.sender.final


def test_what_only_preprocess_judges_passes_through(backend, monkeypatch):
    """Text that is no UTF-8, and whatever tensor the ensemble learns to take."""
    ensemble = Ensemble(lambda _: [LAST])
    front = started(Unary, "vlm_unary", ensemble, monkeypatch)
    front.execute([InferenceRequest([strings("text_input", b"\xff"), strings("new", b"x")], "mine")])
    front.execute([InferenceRequest([strings("sampling_parameters", b"\xff")], "timed", timeout=500)])
    front.finalize()
    assert ensemble.requests["mine"]["text_input"] == bytes_tensor("text_input", b"\xff")
    assert ensemble.requests["mine"]["new"] == bytes_tensor("new", b"x") and "timed" not in ensemble.requests
