"""Settings, tensors, errors, responders and the outbox, against a stand-in for the Python backend."""

from __future__ import annotations

import json
import logging
import os
import threading

import numpy as np
import pytest
import torch
from fakes.backend import InferenceRequest, InferenceResponse, Tensor, strings, wait_until

from tessera.errors import ConfigError, InvalidRequest, Unavailable
from tessera.settings.stages import VisionSettings
from tessera.tritonserver import tensors
from tessera.tritonserver.failures import error_response, log_exception
from tessera.tritonserver.gpu_pool import answer_warm_up
from tessera.tritonserver.metrics import Gauge, write_to_server_log
from tessera.tritonserver.responder import Channel, Outbox, Responder
from tessera.tritonserver.settings import StageSettings


def stage_args(tmp_path, **parameters):
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_name": "vision_encoder",
        "model_config": json.dumps(config),
        "model_repository": str(tmp_path / "models" / "vision_encoder"),
    }


def test_settings_come_from_the_config_and_yield_to_the_environment(tmp_path):
    args = stage_args(tmp_path, threads="2", visual_infer_batch_size="3", checkpoint="../weights")
    for name in ("models", "weights", "other"):
        (tmp_path / name).mkdir()
    plain = StageSettings(args, {})
    read = plain.read(VisionSettings)
    assert (read.threads, read.infer_batch_size, read.device) == (2, 3, "cpu")
    assert plain.checkpoint == tmp_path / "weights"
    environment = {
        "TESSERA_THREADS": "4",
        "TESSERA_VISION_ENCODER_VISUAL_INFER_BATCH_SIZE": "8",
        "TESSERA_CHECKPOINT": str(tmp_path / "other"),
    }
    overridden = StageSettings(args, environment)
    read = overridden.read(VisionSettings)
    assert (read.threads, read.infer_batch_size) == (4, 8)
    assert overridden.checkpoint == tmp_path / "other"


def test_where_nothing_is_set_the_dataclass_and_the_device_say_it(tmp_path, monkeypatch):
    cpu = StageSettings(stage_args(tmp_path), {}).read(VisionSettings)
    assert cpu == VisionSettings()
    monkeypatch.setattr(StageSettings, "_division", None)
    read = StageSettings(stage_args(tmp_path), {"TESSERA_DEVICE": "cuda"}).read(VisionSettings)
    assert (read.device, read.runner, read.dtype, read.infer_batch_size) == ("cuda", "graph", "bfloat16", 16)


def test_variables_of_others_are_let_be(tmp_path):
    """Of other stages, the launcher, the clients, the tests, and of Kubernetes where a service is called tessera."""
    others = ["GPU_MEMORY", "MAX_MODEL_LEN", "LANGUAGE_MODEL_X", "CACHE", "COMMIT", "URL", "HEALTH_URL", "MEMORY"]
    others += ["SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT", "PORT_8001_TCP", "PORT_8001_TCP_ADDR", "REQUIRE_TENSORRT"]
    environment = {f"TESSERA_{name}": "1" for name in others} | {"TESSERACT": "x"}
    StageSettings(stage_args(tmp_path, device="cpu"), environment).read(VisionSettings)


@pytest.mark.parametrize(
    ("parameters", "environment", "words"),
    [
        ({"threads": "many"}, {}, "threads is 'many'; it must be a whole number"),
        (
            {"quantization": "int3"},
            {},
            "quantization is 'int3'; it must be one of checkpoint, fp8, fp8-language, fp8-v",
        ),
        ({"cache_bytes": "-1"}, {}, "cache_bytes is -1; it must be at least 0"),
        ({"cash_bytes": "1"}, {}, "vision_encoder/config.pbtxt: unknown parameter 'cash_bytes'; did you mean cache_b"),
        ({}, {"TESSERA_VISION_ENCODER_CASH_BYTES": "1"}, "unknown .*_CASH_BYTES; did you mean .*_ENCODER_CACHE_BYTES"),
        ({}, {"TESSERA_DEVICE": "tpu"}, "device is 'tpu'; it must be one of auto, cpu, cuda"),
        ({}, {"TESSERA_DTYP": "float16"}, "unknown environment variable TESSERA_DTYP; did you mean TESSERA_DTYPE"),
        ({}, {"TESSERA_LANGUAGE_MODLE_WEIGHTS": "x"}, "unknown environment variable TESSERA_LANGUAGE_MODLE_WEIGHTS"),
        (
            {"vision_url": "eyes:8001"},
            {"TESSERA_DEVICE": "cuda"},
            "vision_url is set in config.pbtxt, where the other stages",
        ),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_with_what_is_allowed(
    tmp_path, monkeypatch, parameters, environment, words
):
    monkeypatch.setattr(StageSettings, "_division", None)
    with pytest.raises(ConfigError, match=words):
        StageSettings(stage_args(tmp_path, **parameters), environment).read(VisionSettings)


def test_text_inputs_must_be_single_and_utf8(backend):
    request = InferenceRequest([strings("text_input", b"a", b"b"), strings("messages", b"\xff\xfe")])
    with pytest.raises(InvalidRequest, match=r"'text_input' takes exactly one element, got 2"):
        tensors.text(request, "text_input")
    with pytest.raises(InvalidRequest, match=r"'messages' is not valid UTF-8 \(byte 0\)"):
        tensors.text(request, "messages")
    assert tensors.text(request, "absent") is None
    assert tensors.flag(InferenceRequest([Tensor("stream", np.array([False]))]), "stream", True) is False
    assert tensors.flag(InferenceRequest([]), "stream", True) is True


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InvalidRequest("image 1 is no picture"), "INVALID_ARG", "image 1 is no picture"),
        (Unavailable("512 requests are in flight"), "UNAVAILABLE", "512 requests"),
        (OSError("/secret/path went away"), "INTERNAL", "preprocess failed"),
    ],
)
def test_errors_keep_their_code_and_leak_nothing(backend, error, code, words):
    failure = error_response("preprocess", error).error()
    assert failure.code() == code
    assert words in failure.message()
    assert "secret" not in failure.message()
    assert any("secret" in line for line in backend.logged) == isinstance(error, OSError)


def test_a_responder_closes_once_and_is_never_asked_again(backend):
    request = InferenceRequest([], "r1")
    responder = Responder(request)
    assert responder.send(InferenceResponse([]), final=False)
    request.sender.cancelled = True
    assert responder.is_cancelled()
    assert responder.finish()
    # The stand-in sender asserts if any of these reaches it.
    assert not responder.is_cancelled()
    assert not responder.send(InferenceResponse([]), final=True)
    assert not responder.finish()
    assert len(request.sender.responses) == 1


FULL = RuntimeError("Failed to increase the shared memory pool size for key 'k' to 1048576 bytes.")


def refuse(request: InferenceRequest, times: int) -> None:
    """The first sends of the request find no shared memory."""
    send, left = request.sender.send, list(range(times))

    def failing(*arguments, **flags) -> None:
        if left:
            left.pop()
            raise FULL
        send(*arguments, **flags)

    request.sender.send = failing


def test_an_answer_that_cannot_go_on_for_want_of_memory_ends_in_an_error(backend):
    request = InferenceRequest([], "r1")
    responder = Responder(request)
    assert responder.send(InferenceResponse([]), final=False)
    refuse(request, 1)
    assert responder.send(InferenceResponse([]), final=False)
    assert request.sender.final and request.sender.responses[-1].error().code() == "UNAVAILABLE"
    assert not responder.send(InferenceResponse([]), final=True)


@pytest.mark.parametrize("final, times", [(True, 1), (False, 2)])
def test_a_last_response_that_finds_no_memory_ends_the_process(backend, monkeypatch, final, times):
    """The real sender takes itself for closed then, and the client would wait for ever."""
    request = InferenceRequest([], "r1")
    refuse(request, times)
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit):
        Responder(request).send(InferenceResponse([]), final=final)


def test_other_faults_of_a_send_are_the_senders(backend):
    request = InferenceRequest([], "r1")
    request.sender.send = lambda *arguments, **flags: (_ for _ in ()).throw(RuntimeError("no such output"))
    with pytest.raises(RuntimeError, match="no such output"):
        Responder(request).send(InferenceResponse([]), final=True)


def test_the_outbox_gathers_items_while_a_send_is_under_way(backend):
    outbox = Outbox("test", threads=2)
    delivered: list[list[int]] = []
    entered, release = threading.Event(), threading.Event()

    def deliver(items: list[int]) -> None:
        delivered.append(items)
        entered.set()
        release.wait(5)

    channel = Channel(deliver)
    outbox.post(channel, 1)
    assert entered.wait(5)
    for item in (2, 3, 4):
        outbox.post(channel, item)
    release.set()
    outbox.close()
    assert delivered == [[1], [2, 3, 4]]


def test_a_failing_delivery_is_logged_and_harms_no_other(backend):
    outbox = Outbox("test", threads=1)
    fine: list[list[int]] = []

    def fail(items: list[int]) -> None:
        raise RuntimeError("gone")

    outbox.post(Channel(fail), 1)
    outbox.post(Channel(fine.append), 2)
    wait_until(lambda: bool(fine))
    outbox.close()
    assert fine == [[2]]
    assert any("gone" in line for line in backend.logged)


def test_the_package_s_log_lines_reach_the_server_s_log(backend):
    write_to_server_log("language_model")
    child = logging.getLogger("tessera.engine.process.main")
    child.info("cache: %d blocks", 7)
    try:
        raise RuntimeError("the card melted")
    except RuntimeError:
        child.exception("a step failed")
    assert backend.logged[0] == "language_model: cache: 7 blocks"
    assert backend.logged[1].startswith("language_model: a step failed\nTraceback") and len(backend.logged) == 2


def test_nobody_else_speaks_with_the_server_while_it_shares_its_gpu_pool(backend, monkeypatch):
    """A metric or a line of the log at that moment would ask for memory that the server still writes to."""
    request = InferenceRequest([])
    spoken: list[str] = []
    write_to_server_log("language_model")
    gauge = Gauge("tessera_rows", "Rows")
    threads = [
        threading.Thread(target=lambda: (gauge.set(1.0), spoken.append("metric"))),
        threading.Thread(target=lambda: (logging.getLogger("tessera.engine").info("hm"), spoken.append("line"))),
        threading.Thread(target=lambda: (log_exception("language_model", ValueError()), spoken.append("error"))),
    ]
    send = request.sender.send

    def share(*arguments, **flags) -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.05)
        assert not spoken
        send(*arguments, **flags)

    request.sender.send = share
    answer_warm_up(Responder(request), "timings", torch.zeros(6))
    for thread in threads:
        thread.join(5)
    assert request.sender.final and sorted(spoken) == ["error", "line", "metric"]
