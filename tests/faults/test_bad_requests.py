"""Bad requests to the running server, several in flight at once with good ones that must not notice."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from faults.asking import Crowd, GrpcAsker, HttpAsker, Outcome, bytes_input, complaint
from faults.badinputs import SHORT, mutants, named_faults, odd_but_good

from tessera.launcher.process import Server

pytestmark = [pytest.mark.server, pytest.mark.faults]

GOOD = [odd_but_good()[name] for name in ("jpeg", "no image", "png 16 bit")]
MAX_TOKENS_BEYOND = {"text_input": (b"Hello?",), "sampling_parameters": (b'{"max_tokens": 1000000}',)}
FAULTS = {**named_faults(), "max_tokens beyond the context": (MAX_TOKENS_BEYOND, "context")}
MUTANTS = 40


@pytest.fixture(autouse=True)
def nothing_dies(server: Server) -> Iterator[None]:
    before = server.stub_pids()
    yield
    assert server.stub_pids() == before
    assert server.failure() is None


def asked(make: Callable[[], GrpcAsker | HttpAsker], requests: list[Any]) -> list[Outcome]:
    """Four at a time."""

    def some(start: int) -> list[Outcome]:
        with closing(make()) as asker:
            return [asker.ask(request) for request in requests[start::4]]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(some, range(4)))
    return [parts[index % 4][index // 4] for index in range(len(requests))]


def by_grpc(server: Server) -> GrpcAsker:
    return GrpcAsker(server.grpc_url)


@pytest.mark.parametrize("make", [by_grpc, lambda server: HttpAsker(server.http_url)])
def test_bad_requests_are_refused_and_good_ones_beside_them_answered(server: Server, make: Any) -> None:
    names = list(FAULTS)
    others = list(mutants(seed=11, count=MUTANTS))
    with Crowd([make(server), make(server)], GOOD) as crowd:
        refused = asked(lambda: make(server), [FAULTS[name][0] for name in names])
        outcomes = asked(lambda: make(server), [inputs.tensors for inputs in others])
    for name, outcome in zip(names, refused):
        assert outcome.status == "INVALID_ARGUMENT" and FAULTS[name][1] in outcome.text, f"{name}: {outcome}"
        assert complaint(outcome.text) is None, f"{name}: {outcome}"
    for inputs, outcome in zip(others, outcomes):
        assert outcome.fine, f"{inputs.name}: {outcome}"
        assert outcome.status == "OK" or complaint(outcome.text) is None, f"{inputs.name}: {outcome}"
    assert crowd.asked > len(GOOD)
    assert not crowd.changed, crowd.changed[:3]


def values(name: str, array: np.ndarray, kind: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


WRONG_TENSORS = {
    "a number for text": lambda: [values("text_input", np.array([1], np.int32), "INT32")],
    "a float picture": lambda: [values("image", np.zeros((1, 4), np.float32), "FP32")],
    "two texts": lambda: [bytes_input("text_input", [b"a", b"b"])],
    "a table of pictures": lambda: [values("image", np.array([[b"a"], [b"b"]], np.object_), "BYTES")],
    "an unknown input": lambda: [bytes_input("text_input", [b"a"]), bytes_input("prompt", [b"a"])],
    "an inner input": lambda: [bytes_input("text_input", [b"a"]), values("SPANS", np.zeros((1, 2), np.int32), "INT32")],
    "text for a flag": lambda: [bytes_input("text_input", [b"a"]), bytes_input("stream", [b"true"])],
    "the same input twice": lambda: [bytes_input("text_input", [b"a"]), bytes_input("text_input", [b"b"])],
}


@pytest.mark.parametrize("model", ["vlm", "vlm_stream"])
def test_wrong_tensors_are_refused_over_grpc(server: Server, model: str) -> None:
    with closing(GrpcAsker(server.grpc_url, model)) as asker:
        for name, make in WRONG_TENSORS.items():
            outcome = asker.send([*make(), bytes_input("sampling_parameters", [SHORT])])
            if name != "the same input twice":
                assert outcome.status in ("", "INVALID_ARGUMENT") and outcome.text, f"{name}: {outcome}"
            assert outcome.status not in ("HANG", "INTERNAL"), f"{name}: {outcome}"


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": 5},
        {"text_input": ["a", "b"]},
        {"text_input": None},
        {"text_input": "a", "stream": "yes"},
        {"text_input": "a", "image": [[1]]},
        {"text_input": "a", "messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a"},
        [],
    ],
)
def test_wrong_json_is_refused_over_http(server: Server, body: Any) -> None:
    for model, way in (("vlm", "generate_stream"), ("vlm_unary", "generate"), ("vlm_unary", "infer")):
        outcome = HttpAsker(server.http_url, model).post(way, json.dumps(body).encode())
        assert outcome.status not in ("OK", "HANG") and outcome.text, f"{way}: {outcome}"


INNER = {
    "language_model": {"PING": b"\xff", "CANCEL": b"\xff", "sampling_parameters": b"[]"},
    "preprocess": {"PING": b"\xff"},
    "vlm_unary": {"PING": b"\xff"},
    "vlm_stream": {"PING": b"\xff"},
}


@pytest.mark.parametrize("model", list(INNER))
def test_control_requests_that_are_not_text_are_refused(server: Server, model: str) -> None:
    """No client should talk to an inner stage, and one that does must not break it."""
    for name, data in INNER[model].items():
        inputs = [bytes_input(name, [data])]
        if name == "sampling_parameters":
            ids, spans = np.zeros(1, np.int32), np.zeros((0, 2), np.int32)
            inputs += [values("INPUT_IDS", ids, "INT32"), values("SPANS", spans, "INT32")]
        with closing(GrpcAsker(server.grpc_url, model)) as asker:
            outcome = asker.send(inputs)
        assert outcome.status == "INVALID_ARGUMENT" and name in outcome.text, f"{name}: {outcome}"


def test_pixels_that_do_not_fit_their_plan_leave_other_pictures_alone(server: Server) -> None:
    pixels = values("PIXELS", np.zeros((1, 7), np.uint8), "UINT8")
    plan, digest = np.array([[0, 1, 1, 1]], np.int32), np.zeros((1, 2), np.int64)
    wrong = [pixels, values("PLAN", plan, "INT32"), values("DIGEST", digest, "INT64")]
    asker = GrpcAsker(server.grpc_url, "vision_encoder")
    with closing(asker), Crowd([by_grpc(server) for _ in range(3)], GOOD) as crowd:
        for stamps in (np.zeros((1, 4), np.int64), np.zeros((1, 1), np.int64), None):
            more = [] if stamps is None else [values("STAMPS", stamps, "INT64")]
            outcome = asker.send(wrong + more)
            assert outcome.status == "INVALID_ARGUMENT", outcome
    assert not crowd.changed
