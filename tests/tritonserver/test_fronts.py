"""The fronts against a stand-in for the ensemble."""

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, strings, wait_until

from tessera.tritonserver.fronts import TritonPythonModel
from tessera_wire import errors
from tessera_wire.connection import Connection
from tessera_wire.tensors import Tensor as Sent
from tessera_wire.tensors import bytes_tensor, elements

UNARY, STREAM = "vlm_unary", "vlm_stream"
both = pytest.mark.parametrize("name", [UNARY, STREAM])
QUESTION = strings("text_input", b"?")
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
    """A line that answers with what `answer` gives, an error at the end or none, and notes what it was asked."""

    def __init__(self, answer: Callable[[str], Iterable[Any]]) -> None:
        self.answer = answer
        self.requests: dict[str, dict[str, Sent]] = {}
        self.priorities: list[int] = []
        self.threads: list[threading.Thread] = []

    def send(
        self, model: str, request_id: str, inputs: list[Sent], deliver: Callable[[Any], None], priority: int, lease: str
    ) -> None:
        assert model == "vlm"
        self.priorities.append(priority)
        self.requests[request_id] = {tensor.name: tensor for tensor in inputs}
        self.threads.append(threading.Thread(target=self.work, args=(request_id, deliver)))
        self.threads[-1].start()

    def work(self, request_id: str, deliver: Callable[[Any], None]) -> None:
        message = None
        for message in self.answer(request_id):
            deliver(message)
        if not isinstance(message, errors.TesseraClientError):
            deliver(None)

    def cancel(self, lease: str) -> None: ...

    def close(self, seconds: float) -> None:
        for thread in self.threads:
            thread.join()


@pytest.fixture
def relay(backend, monkeypatch):
    """Has requests handed on by a front to an ensemble, until all are answered."""

    def run(name: str, ensemble: Ensemble, *requests: InferenceRequest) -> list[dict[str, list]]:
        """What the requests were answered with."""
        front = TritonPythonModel()
        monkeypatch.setattr(front, "open_line", lambda address: ensemble)
        config = {"model_transaction_policy": {"decoupled": name == STREAM}}
        front.initialize({"model_name": name, "model_config": json.dumps(config), "model_repository": "/m"})
        front.execute(list(requests))
        wait_until(lambda: all(request.sender.final for request in requests))
        front.finalize()
        return [outputs(response) for request in requests for response in request.sender.responses]

    return run


def outputs(response) -> dict[str, Any]:
    """By name; of an error its code and its words."""
    if response.has_error():
        return {"code": response.error().code(), "words": response.error().message()}
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


ANSWERED = {"text_output": [b"b"], "finish_reason": [b"stop"], "usage": [9, 2, 4], "timings": [0.5, 1.5]}
BEGUN = {"text_output": [b"a"], "finish_reason": [b""], "usage": [0, 0, 0], "timings": [0.5, 1.5]}


def test_unary_asks_for_one_response_and_hands_all_of_it_on(relay):
    ensemble = Ensemble(lambda _: [LAST])
    given = [
        strings("text_input", b"?"),
        strings("image", b"one", b"two"),
        strings("sampling_parameters", b'{"seed": 1, "priority": 7}'),
        Tensor("stream", np.array([True])),
        Tensor("exclude_input_in_output", np.array([True])),
    ]
    assert relay(UNARY, ensemble, InferenceRequest(given, "mine")) == [ANSWERED]
    assert ensemble.priorities == [7]
    assert ensemble.requests == {
        "mine": {
            "text_input": bytes_tensor("text_input", b"?"),
            "image": bytes_tensor("image", b"one", b"two"),
            "sampling_parameters": bytes_tensor("sampling_parameters", b'{"seed": 1, "priority": 7}'),
            "stream": Sent("stream", "BOOL", (1,), b"\0"),
            "exclude_input_in_output": Sent("exclude_input_in_output", "BOOL", (1,), b"\1"),
        }
    }


def test_stream_relays_every_response_and_then_ends(relay):
    ensemble = Ensemble(lambda _: [answer_of("a"), LAST])
    assert relay(STREAM, ensemble, InferenceRequest([QUESTION])) == [BEGUN, ANSWERED]
    assert next(iter(ensemble.requests.values()))["stream"].data == b"\1"
    broken = Ensemble(lambda _: [answer_of("a"), errors.ConnectionFailed("the line broke")])
    first, last = relay(STREAM, broken, InferenceRequest([QUESTION]))
    assert len(broken.requests) == 1 and first == BEGUN and last["code"] == "UNAVAILABLE"


@both
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("too many tiles"), "INVALID_ARG"),
        (errors.DeadlineExceeded("deadline exceeded after 5 ms"), "UNAVAILABLE"),
        (errors.ConnectionFailed("the server is stopping"), "UNAVAILABLE"),
        (errors.ProtocolError("no outputs"), "INTERNAL"),
    ],
)
def test_an_error_of_the_ensemble_reaches_the_client_once_with_its_code(relay, name, error, code):
    (answer,) = relay(name, Ensemble(lambda _: [error]), InferenceRequest([]))
    assert answer["code"] == code and error.message in answer["words"]


def test_two_requests_under_one_id_are_told_apart(relay):
    both = threading.Barrier(2)

    def answer(request_id):
        both.wait(5)
        yield answer_of(request_id, "stop")

    ensemble = Ensemble(answer)
    answers = relay(UNARY, ensemble, *(InferenceRequest([QUESTION], "same") for _ in range(2)))
    answered = {answer["text_output"][0].decode() for answer in answers}
    assert len(answered) == 2 and "same" in answered and answered == set(ensemble.requests)


@both
def test_request_parameters_and_a_timeout_travel_in_the_sampling_parameters(relay, name):
    def sent() -> dict[str, Any]:
        (sampling,) = elements(inputs["sampling_parameters"].data)
        return json.loads(sampling)

    ensemble = Ensemble(lambda _: [LAST])
    parameters = '{"id": "7", "top_k": 5, "stream": false, "exclude_input_in_output": true, "timeout": 900}'
    given = [strings("sampling_parameters", b'{"max_tokens": 3}')]
    relay(name, ensemble, InferenceRequest(given, parameters=parameters))
    (inputs,) = ensemble.requests.values()
    assert sent() == {"max_tokens": 3, "top_k": 5, "timeout_us": 900}
    assert (inputs["stream"].data, inputs["exclude_input_in_output"].data) == (b"\0", b"\1")
    ensemble.requests.clear()
    relay(name, ensemble, InferenceRequest(given, timeout=500))
    (inputs,) = ensemble.requests.values()
    assert sent() == {"timeout_us": 500, "max_tokens": 3}


@both
def test_an_answer_that_cannot_be_relayed_is_an_error(relay, name):
    broken = answer_of("a")
    broken.raw_output_contents[0] = b"\1"
    (answer,) = relay(name, Ensemble(lambda _: [broken]), InferenceRequest([QUESTION]))
    assert answer["code"] == "INTERNAL"
    assert "no answer" in str(relay(UNARY, Ensemble(lambda _: []), InferenceRequest([QUESTION])))  # never silence


def test_what_only_preprocess_judges_passes_through(relay):
    """Text that is no UTF-8, and whatever tensor the ensemble learns to take."""
    ensemble = Ensemble(lambda _: [LAST])
    odd = InferenceRequest([strings("text_input", b"\xff"), strings("new", b"x")], "mine")
    _, refused = relay(UNARY, ensemble, odd, InferenceRequest([strings("sampling_parameters", b"\xff")], "timed"))
    assert refused["code"] == "INVALID_ARG" and "'sampling_parameters' is not valid UTF-8" in refused["words"]
    assert ensemble.requests["mine"]["text_input"] == bytes_tensor("text_input", b"\xff")
    assert ensemble.requests["mine"]["new"] == bytes_tensor("new", b"x") and "timed" not in ensemble.requests
