"""The fronts against a stand-in ensemble."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from fakes.backend import InferenceRequest, InferenceResponse, Tensor, TritonError, strings, wait_until

from tessera.fronts import stream, unary


def started(kind, name):
    front = kind.TritonPythonModel()
    parameters = {"ensemble": {"string_value": "vlm"}, "threads": {"string_value": "4"}}
    front.initialize(
        {"model_name": name, "model_config": json.dumps({"parameters": parameters}), "model_repository": "/m"}
    )
    return front


def chunk(text: str) -> InferenceResponse:
    return InferenceResponse([strings("text_output", text.encode())])


def texts(request: InferenceRequest) -> list[bytes]:
    return [response.output_tensors()[0].as_numpy()[0] for response in request.sender.responses]


def test_unary_asks_for_one_response_and_hands_it_on(backend):
    seen: list[InferenceRequest] = []

    def ensemble(call):
        seen.append(call)
        return iter([chunk("yes"), InferenceResponse([])])

    InferenceRequest.calls = ensemble
    front = started(unary, "vlm_unary")
    request = InferenceRequest([strings("text_input", b"?"), Tensor("stream", np.array([True]))], "mine")
    front.execute([request])
    front.finalize()
    assert texts(request) == [b"yes"]
    assert request.sender.final
    (call,) = seen
    assert call.model_name == "vlm"
    assert call.id == "mine"
    sent = {tensor.name(): tensor.as_numpy() for tensor in call.tensors}
    assert set(sent) == {"text_input", "stream"}
    assert sent["stream"].tolist() == [False]


def test_stream_relays_every_response_and_then_ends(backend):
    InferenceRequest.calls = lambda call: iter([chunk("a"), chunk("b"), InferenceResponse([])])
    front = started(stream, "vlm_stream")
    request = InferenceRequest([strings("text_input", b"?")])
    front.execute([request])
    front.finalize()
    assert texts(request) == [b"a", b"b"]
    assert request.sender.final


@pytest.mark.parametrize(("kind", "name"), [(unary, "vlm_unary"), (stream, "vlm_stream")])
def test_an_error_of_the_ensemble_reaches_the_client_once(backend, kind, name):
    # The call between models loses the code; the words keep it.
    failure = TritonError("in ensemble 'vlm', INVALID_ARGUMENT: too many tiles", TritonError.INTERNAL)
    InferenceRequest.calls = lambda call: iter([InferenceResponse([], failure), InferenceResponse([])])
    front = started(kind, name)
    request = InferenceRequest([])
    front.execute([request])
    front.finalize()
    (response,) = request.sender.responses
    assert response.error().code() == "INVALID_ARG"
    assert request.sender.final


@pytest.mark.parametrize(("kind", "name"), [(unary, "vlm_unary"), (stream, "vlm_stream")])
def test_a_client_that_goes_away_cancels_its_request_by_id(backend, kind, name):
    cancelled: list[bytes] = []
    stopped = threading.Event()

    def server(call):
        if call.model_name == "language_model":
            cancelled.append(call.tensors[0].as_numpy()[0])
            stopped.set()
            return iter([])
        return working()

    def working():
        yield chunk("a")
        assert stopped.wait(5)

    InferenceRequest.calls = server
    front = started(kind, name)
    request = InferenceRequest([strings("text_input", b"?")], "theirs")
    front.execute([request])
    request.sender.cancelled = True
    wait_until(lambda: request.sender.final)
    front.finalize()
    assert set(cancelled) == {b"theirs"}


@pytest.mark.parametrize(("kind", "name", "responses"), [(unary, "vlm_unary", 1), (stream, "vlm_stream", 0)])
def test_a_ping_is_answered_by_the_front_itself(backend, kind, name, responses):
    InferenceRequest.calls = lambda call: pytest.fail("a ping went on to the ensemble")
    front = started(kind, name)
    request = InferenceRequest([strings("PING", b"?")])
    front.execute([request])
    front.finalize()
    assert request.sender.final
    assert len(request.sender.responses) == responses


def test_a_timeout_travels_in_the_sampling_parameters(backend):
    calls: list[InferenceRequest] = []

    def ensemble(call):
        calls.append(call)
        return iter([chunk("yes")])

    InferenceRequest.calls = ensemble
    front = started(unary, "vlm_unary")
    front.execute([InferenceRequest([strings("sampling_parameters", b'{"max_tokens": 3}')], timeout=500)])
    front.execute([InferenceRequest([strings("sampling_parameters", b"not json")], timeout=500)])
    front.finalize()
    sent = [{t.name(): t.as_numpy()[0] for t in call.tensors if t.name() != "stream"} for call in calls]
    found = {values["sampling_parameters"] for values in sent}
    assert found == {b'{"timeout_us": 500, "max_tokens": 3}', b"not json"}


def test_a_cancel_that_came_too_early_is_sent_again(backend, monkeypatch):
    """While a picture is still at the vision stage the language model does not know its request."""
    monkeypatch.setattr("tessera.fronts.front.CANCEL_AGAIN_SECONDS", 0.05)
    cancels: list[bytes] = []
    stopped = threading.Event()

    def server(call):
        if call.model_name == "language_model":
            cancels.append(call.tensors[0].as_numpy()[0])
            if len(cancels) == 3:
                stopped.set()
            return iter([])
        return working()

    def working():
        assert stopped.wait(5)
        yield chunk("a")

    InferenceRequest.calls = server
    front = started(stream, "vlm_stream")
    request = InferenceRequest([strings("text_input", b"?")], "theirs")
    request.sender.cancelled = True
    front.execute([request])
    wait_until(lambda: request.sender.final)
    front.finalize()
    assert cancels[:3] == [b"theirs"] * 3
