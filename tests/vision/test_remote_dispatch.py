"""Jobs for another server: messages, errors, deadlines, sockets, against a gRPC server in this process."""

import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2

from tessera.errors import ConfigError, InvalidRequest, Unavailable
from tessera.vision.pictures import VisionItem
from tessera.vision.remote import RemoteDispatcher

ITEM = VisionItem(np.arange(12, dtype=np.uint8), np.array([0, 1, 2, 2], np.int32), np.array([7, -9], np.int64))
ROWS = torch.arange(6, dtype=torch.bfloat16).view(3, 2)


class Job:
    item, priority = ITEM, -3

    def __init__(self, deadline_ns=0):
        self.deadline_ns, self.outcomes, self.done = deadline_ns, [], threading.Event()

    def answer(self, rows):
        self.outcomes.append(rows)
        self.done.set()

    fail = answer

    def outcome(self):
        assert self.done.wait(20)
        (found,) = self.outcomes
        return found


class Other(grpc.GenericRpcHandler):
    """A server whose vision_encoder does what ``behave(message, context)`` does, then answers with ROWS."""

    def __init__(self, behave, port=0):
        self.behave, self.messages = behave, []
        self.server = grpc.server(futures.ThreadPoolExecutor(16), handlers=[self])
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def service(self, details):
        assert details.method == "/inference.GRPCInferenceService/ModelInfer"
        return grpc.unary_unary_rpc_method_handler(
            self.infer, service_pb2.ModelInferRequest.FromString, service_pb2.ModelInferResponse.SerializeToString
        )

    def infer(self, message, context):
        self.messages.append(message)
        self.behave(message, context)
        answer = service_pb2.ModelInferResponse(raw_output_contents=[ROWS.view(torch.uint8).numpy().tobytes()])
        answer.outputs.add(name="EMBEDDINGS", datatype="BF16", shape=ROWS.shape)
        return answer


@pytest.fixture
def ways():
    """Makes a server and the dispatcher to it; both end with the test."""
    opened = []

    def make(behave=lambda message, context: None):
        other = Other(behave)
        dispatcher = RemoteDispatcher(f"127.0.0.1:{other.port}")
        opened.append((other, dispatcher))
        return other, dispatcher

    yield make
    for other, dispatcher in opened:
        dispatcher.close()
        other.server.stop(None)


def asked(dispatcher, job):
    dispatcher.encode([job])
    return job.outcome()


def test_tensors_travel_and_rows_come_back(ways):
    other, dispatcher = ways()
    assert torch.equal(asked(dispatcher, Job()), ROWS)
    (message,) = other.messages
    assert message.model_name == "vision_encoder"
    assert [(i.name, i.datatype, list(i.shape)) for i in message.inputs] == [
        ("PIXELS", "UINT8", [1, 12]), ("PLAN", "INT32", [1, 4]), ("DIGEST", "INT64", [1, 2]),
        ("STAMPS", "INT64", [1, 4]),
    ]  # fmt: skip
    assert message.raw_input_contents[2] == ITEM.digest.tobytes()
    assert np.frombuffer(message.raw_input_contents[3], np.int64).tolist() == [0, -3, 0, 0]


def test_many_jobs_are_under_way_on_one_connection(ways):
    together, peers = threading.Barrier(8), set()
    _, dispatcher = ways(lambda message, context: (peers.add(context.peer()), together.wait(10)))
    jobs = [Job() for _ in range(8)]
    dispatcher.encode(jobs)
    assert all(torch.equal(job.outcome(), ROWS) for job in jobs)
    assert len(peers) == 1


@pytest.mark.parametrize(
    ("code", "details", "kind", "words"),
    [
        (
            "INVALID_ARGUMENT",
            "[request id: 3] INVALID_ARGUMENT: PLAN has 3 values",
            InvalidRequest,
            "PLAN has 3 values",
        ),
        ("UNAVAILABLE", "Exceeds maximum queue size", Unavailable, "vision stage at 127.0.0.1"),
        ("INTERNAL", "Stub process 'vision_encoder_0_0' is not healthy.", Unavailable, "not healthy"),
        ("INTERNAL", "INTERNAL: vision_encoder failed on this request", RuntimeError, "vision_encoder failed"),
        ("NOT_FOUND", "Request for unknown model: 'vision_encoder' is not found", RuntimeError, "unknown model"),
    ],
)
def test_errors_keep_their_kind_and_blame_the_right_side(ways, code, details, kind, words):
    _, dispatcher = ways(lambda message, context: context.abort(grpc.StatusCode[code], details))
    error = asked(dispatcher, Job())
    assert type(error) is kind and words in str(error)


def test_the_deadline_travels_as_the_time_that_is_left(ways):
    left, release = [], threading.Event()
    _, dispatcher = ways(lambda message, context: (left.append(context.time_remaining()), release.wait(10)))
    began = time.monotonic_ns()
    error = asked(dispatcher, Job(began + 300_000_000))
    assert isinstance(error, TimeoutError) and 0 < left[0] < 0.31  # gRPC rounds up, to milliseconds and more
    assert isinstance(asked(dispatcher, Job(began)), TimeoutError)  # has passed: nothing is sent
    assert len(left) == 1
    release.set()


def test_jobs_under_way_are_failed_when_the_stage_ends(ways):
    entered, release = threading.Event(), threading.Event()
    _, dispatcher = ways(lambda message, context: (entered.set(), release.wait(10)))
    job = Job()
    dispatcher.encode([job])
    assert entered.wait(10)
    dispatcher.close()
    assert isinstance(job.outcome(), Exception)
    release.set()


@pytest.mark.parametrize("url", ["http://other:8000", "other:many", "other:1/path"])
def test_an_address_that_is_none_ends_the_start(url):
    with pytest.raises(ConfigError, match="vision_url"):
        RemoteDispatcher(url)
