"""The fronts against a stand-in for the ensemble."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, strings, wait_until

from tessera.fronts import stream, unary
from tessera_client import errors
from tessera_client.messages import Delta, LabelScore, Request, Timings, Usage

BOTH = [(unary, "vlm_unary"), (stream, "vlm_stream")]
LAST = Delta(
    "b", "stop", Usage(9, 2, 4), Timings(1, 2, 3, 4, 5, 6), [{"token_id": 7}], (LabelScore("b", -0.5, 0.6, 0.7),)
)


class Responses:
    def __init__(self, deltas: Iterable[Delta]) -> None:
        self.deltas = iter(deltas)

    def __iter__(self) -> Iterator[Delta]:
        return self.deltas

    def cancel(self) -> None:
        pass


class Ensemble:
    """A transport that answers with what `answer` yields, and notes what it was asked."""

    def __init__(self, answer: Callable[[str], Iterable[Delta]], servers: int = 1) -> None:
        self.answer = answer
        self.addresses = tuple(f"server{i}" for i in range(servers))
        self.requests: dict[str, Request] = {}
        self.bound: list[int | None] = []
        self.cancelled: list[str] = []

    def send(self, request: Request, request_id: str, timeout: float | None, only: int | None = None) -> Responses:
        self.requests[request_id] = request
        self.bound.append(only)
        return Responses(self.answer(request_id))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        pass


def started(kind, name, ensemble, monkeypatch):
    front = kind.TritonPythonModel()
    monkeypatch.setattr(front, "open_transport", lambda addresses, name: ensemble)
    front.initialize({"model_name": name, "model_config": "{}", "model_repository": "/m"})
    return front


def outputs(response) -> dict[str, list]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def test_unary_asks_for_one_response_and_hands_all_of_it_on(backend, monkeypatch):
    ensemble = Ensemble(lambda _: [LAST])
    front = started(unary, "vlm_unary", ensemble, monkeypatch)
    given = [
        strings("text_input", b"?"),
        strings("image", b"one", b"two"),
        strings("sampling_parameters", b"{}"),
        Tensor("stream", np.array([True])),
        Tensor("exclude_input_in_output", np.array([True])),
    ]
    request = InferenceRequest(given, "mine")
    front.execute([request])
    front.finalize()
    assert ensemble.requests == {"mine": Request("?", None, (b"one", b"two"), "{}", stream=False, exclude_input=True)}
    (response,) = request.sender.responses
    assert request.sender.final
    assert outputs(response) == {
        "text_output": [b"b"],
        "finish_reason": [b"stop"],
        "usage": [9, 2, 4],
        "timings": [1, 2, 3, 4, 5, 6],
        "logprobs": [b'[{"token_id": 7}]'],
        "choices": [b'[{"label": "b", "logprob": -0.5, "probability": 0.6, "normalized": 0.7}]'],
    }


def test_stream_relays_every_response_and_then_ends(backend, monkeypatch):
    ensemble = Ensemble(lambda _: [Delta("a"), LAST])
    front = started(stream, "vlm_stream", ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    first, last = (outputs(response) for response in request.sender.responses)
    assert first["text_output"] == [b"a"] and first["finish_reason"] == [b""] and first["usage"] == [0, 0, 0]
    assert first["logprobs"] == first["choices"] == [b""]
    assert last["text_output"] == [b"b"]
    assert request.sender.final
    assert next(iter(ensemble.requests.values())).stream


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


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_request_without_an_id_goes_on_to_the_next_server_that_takes_it(backend, monkeypatch, kind, name):
    def answer(_):
        if len(ensemble.bound) < 3:
            raise [errors.ConnectionFailed("refused"), errors.Unavailable("stopping")][len(ensemble.bound) - 1]
        yield LAST

    ensemble = Ensemble(answer, servers=3)
    front = started(kind, name, ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert ensemble.bound == [None] * 3 and len(ensemble.requests) == 1
    assert outputs(request.sender.responses[0])["text_output"] == [b"b"] and request.sender.final


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_request_with_an_id_stays_with_its_server(backend, monkeypatch, kind, name):
    """Its client may ask this server's language model to cancel the id."""

    def refuse(_):
        raise errors.Unavailable("the queue is full")
        yield

    ensemble = Ensemble(refuse, servers=2)
    front = started(kind, name, ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")], "mine")
    front.execute([request])
    front.finalize()
    assert ensemble.bound == [0] and set(ensemble.requests) == {"mine"}
    assert request.sender.responses[0].error().code() == "UNAVAILABLE"


def test_a_stream_that_breaks_after_its_first_part_is_not_begun_again(backend, monkeypatch):
    def answer(_):
        yield Delta("a")
        raise errors.ConnectionFailed("the line broke")

    ensemble = Ensemble(answer, servers=2)
    front = started(stream, "vlm_stream", ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert len(ensemble.bound) == 1
    first, last = request.sender.responses
    assert outputs(first)["text_output"] == [b"a"] and last.error().code() == "UNAVAILABLE"


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_a_client_that_goes_away_cancels_its_request_until_it_ends(backend, monkeypatch, kind, name):
    """One cancel may come too early: a picture at the vision stage is nothing the language model knows."""
    monkeypatch.setattr("tessera.fronts.front.CANCEL_AGAIN_SECONDS", 0.05)

    def working(_):
        wait_until(lambda: len(ensemble.cancelled) >= 3)
        yield Delta("", "cancelled")

    ensemble = Ensemble(working)
    front = started(kind, name, ensemble, monkeypatch)
    request = InferenceRequest([strings("text_input", b"?")], "theirs")
    request.sender.cancelled = True
    front.execute([request])
    wait_until(lambda: request.sender.final)
    front.finalize()
    assert set(ensemble.cancelled) == {"theirs"}


def test_two_requests_under_one_id_are_told_apart(backend, monkeypatch):
    both = threading.Barrier(2)

    def answer(request_id):
        both.wait(5)
        yield Delta(request_id, "stop")

    ensemble = Ensemble(answer)
    front = started(unary, "vlm_unary", ensemble, monkeypatch)
    requests = [InferenceRequest([strings("text_input", b"?")], "same") for _ in range(2)]
    front.execute(requests)
    front.finalize()
    answered = [outputs(request.sender.responses[0])["text_output"][0].decode() for request in requests]
    assert len(set(answered)) == 2 and "same" in answered
    assert set(answered) == set(ensemble.requests)


@pytest.mark.parametrize(("kind", "name", "responses"), [(unary, "vlm_unary", 1), (stream, "vlm_stream", 0)])
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
    front = started(unary, "vlm_unary", ensemble, monkeypatch)
    front.execute([InferenceRequest([strings("sampling_parameters", b'{"max_tokens": 3}')], timeout=500)])
    front.execute([InferenceRequest([strings("sampling_parameters", b"not json")], timeout=500)])
    front.finalize()
    sent = {request.sampling for request in ensemble.requests.values()}
    assert sent == {'{"timeout_us": 500, "max_tokens": 3}', "not json"}


def test_text_that_is_not_utf8_is_refused_here(backend, monkeypatch):
    front = started(unary, "vlm_unary", Ensemble(lambda _: [LAST]), monkeypatch)
    request = InferenceRequest([strings("text_input", b"\xff")])
    front.execute([request])
    front.finalize()
    assert request.sender.responses[0].error().code() == "INVALID_ARG"
