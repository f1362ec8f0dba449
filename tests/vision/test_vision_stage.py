"""The stage itself against a stand-in for the Python backend: what it reads, refuses and answers."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.backend import InferenceRequest, Tensor, stage_args, strings, wait_until

from tessera.settings.stages import VisionSettings
from tessera.tritonserver import vision
from tessera.tritonserver.settings import StageSettings

ROOT = Path(__file__).resolve().parents[2]
SIDE, TOKENS = 448, 64  # the default checkpoint's


@pytest.fixture
def stage(backend, monkeypatch):
    """Starts the stage as config.pbtxt has it, on torch, with other parameters where a test gives some."""
    started = []

    def start(**parameters):
        as_set = StageSettings.read
        chosen = {"runner": "torch"} | parameters
        monkeypatch.setattr(StageSettings, "read", lambda self, kind: replace(as_set(self, kind), **chosen))
        model = vision.TritonPythonModel()
        model.initialize(stage_args("vision_encoder"))
        started.append(model)
        return model

    yield start
    for model in started:
        model.finalize()


def test_what_preprocess_cuts_is_known_here_too(stage, monkeypatch):
    def told(checkpoint, settings):
        raise InterruptedError(settings.tile_policy)

    monkeypatch.setattr(vision, "local_scheduler", told)
    for said, policy in (("native", "native"), ("0", None)):
        monkeypatch.setenv("TESSERA_PREPROCESS_TILE_POLICY", said)
        with pytest.raises(InterruptedError, match=f"^{policy}$"):
            stage()


@pytest.mark.parametrize(("model", "priority"), [("default_model", None), ("document_model", "1")])
def test_forwards_of_whole_pictures_stand_below_the_language_model(model, priority, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY")

    def from_checkpoint(config, settings):  # from here on the GPU is used
        raise InterruptedError(os.environ.get("CUDA_MPS_CLIENT_PRIORITY"))

    monkeypatch.setattr(vision.VisionEncoder, "from_checkpoint", from_checkpoint)
    with pytest.raises(InterruptedError, match=str(priority)):
        vision.local_scheduler(ROOT / "build" / model / "checkpoint", VisionSettings())


def request(tiles, digest=1, deadline=0, priority=0, **change):
    tensors = {
        "PIXELS": np.full((1, tiles * SIDE * SIDE * 3), digest, np.uint8),
        "PLAN": np.array([[0, tiles, 1, tiles] if tiles else []], np.int32),
        "DIGEST": np.array([[digest, 0] if tiles else []], np.int64),
        "STAMPS": np.array([[deadline, priority, 5, 6]], np.int64),
    } | change
    return InferenceRequest([Tensor(name, values) for name, values in tensors.items() if values is not None])


def answers(model, *requests):
    """Each request's one response, as name -> array or as its error."""
    model.execute(list(requests))
    wait_until(lambda: all(request.sender.final for request in requests), 20)
    found = []
    for each in requests:
        (response,) = each.sender.responses
        tensors = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        found.append(response.error().message() if response.has_error() else tensors)
    return found


def test_the_warm_up_has_rows_for_an_answer_before_execute_returns(stage):
    request = InferenceRequest([strings("PING", b"")])
    stage().execute([request])
    (response,) = request.sender.responses
    assert request.sender.final and [tensor.name() for tensor in response.output_tensors()] == ["EMBEDDINGS"]


def test_a_batch_is_answered_one_by_one(stage):
    model = stage(infer_batch_size=2, dtype="float32")
    ping = InferenceRequest([strings("PING", b"?")])
    first, prompt_alone, late, wrong, again, pong = answers(
        model, request(2), request(0), request(1, deadline=7), request(1, PIXELS=np.zeros((1, 9), np.uint8)),
        request(2), ping,
    )  # fmt: skip
    assert first["EMBEDDINGS"].shape == (2 * TOKENS, 2 * 128)  # of float32 rows, each number in two halves
    assert np.array_equal(first["EMBEDDINGS"], again["EMBEDDINGS"], equal_nan=True)
    began, ended = first["STAMPS"][0, 4:]
    assert first["STAMPS"][0, :4].tolist() == [0, 0, 5, 6] and 0 < began < ended <= time.monotonic_ns()
    assert set(prompt_alone) == {"STAMPS"} and prompt_alone["STAMPS"].size == 6
    assert late.startswith("UNAVAILABLE: deadline exceeded after")
    assert wrong == "INVALID_ARGUMENT: PIXELS has 9 bytes; the plan needs 602112"
    assert set(pong) == {"STAMPS"}


def test_the_page_has_what_is_held_and_what_waits(backend, monkeypatch):
    gauges = {}

    class Family(backend.MetricFamily):
        def __init__(self, name, **about):
            super().__init__(name, **about)
            gauges[name] = self.values

    monkeypatch.setattr(backend, "MetricFamily", Family)
    encoder = SimpleNamespace(budget=SimpleNamespace(used_bytes=7), computed=5, launching_s=0.5)
    page = vision.page_of(SimpleNamespace(encoder=encoder, queue=[None] * 3))
    wait_until(lambda: all(gauges.values()))
    page.close()
    assert {name: values[0] for name, values in gauges.items()} == {
        "tessera_vision_pictures_total": 5.0,
        "tessera_vision_launching_seconds_total": 0.5,
        "tessera_vision_row_bytes": 7.0,
        "tessera_vision_requests_waiting": 3.0,
    }
