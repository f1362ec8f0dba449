"""Settings, tensors, errors, responders, the outbox and a lost GPU, against a stand-in for the Python backend."""

import ctypes
import json
import logging
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from fakes.backend import InferenceRequest, InferenceResponse, strings

from tessera.errors import ConfigError, InvalidRequest, end_process_if_lost
from tessera.settings.stages import EngineConfig, VisionSettings
from tessera.tritonserver import tensors
from tessera.tritonserver.failures import error_response, log_exception
from tessera.tritonserver.fingerprint import fingerprint
from tessera.tritonserver.gpu_pool import answer_warm_up
from tessera.tritonserver.metrics import Gauge, write_to_server_log
from tessera.tritonserver.responder import Channel, Outbox, Responder
from tessera.tritonserver.settings import StageSettings
from tessera.tritonserver.tensors import packed, unpacked


def settings(tmp_path, environment, **parameters):
    """Of a vision stage."""
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    folder = str(tmp_path / "models" / "vision_encoder")
    args = {"model_name": "vision_encoder", "model_config": json.dumps(config), "model_repository": folder}
    return StageSettings(args, environment)


def test_settings_come_from_the_config_and_yield_to_the_environment(tmp_path, monkeypatch):
    """Variables of others are let be: other stages', the launcher's, the clients', the tests', and those of Kubernetes
    where a service is called tessera."""
    parameters = {"threads": "2", "visual_infer_batch_size": "3", "checkpoint": "../weights"}
    for name in ("models", "weights", "other"):
        (tmp_path / name).mkdir()
    others = ["GPU_MEMORY", "MAX_MODEL_LEN", "LANGUAGE_MODEL_X", "CACHE", "COMMIT", "URL", "HEALTH_URL", "MEMORY"]
    others += ["SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT", "PORT_8001_TCP", "PORT_8001_TCP_ADDR", "REQUIRE_TENSORRT"]
    around = {f"TESSERA_{name}": "1" for name in others} | {"TESSERACT": "x"}
    own = {"THREADS": "4", "VISION_ENCODER_VISUAL_INFER_BATCH_SIZE": "8"}
    own = {f"TESSERA_{name}": value for name, value in (own | {"CHECKPOINT": str(tmp_path / "other")}).items()}
    for environment, threads, size, folder in ((around, 2, 3, "weights"), (own, 4, 8, "other")):
        stage = settings(tmp_path, environment, **parameters)
        read = stage.read(VisionSettings)
        assert (read.threads, read.infer_batch_size, read.device) == (threads, size, "cpu")
        assert stage.checkpoint == tmp_path / folder
    assert (read := settings(tmp_path, {}).read(VisionSettings)) == VisionSettings(dtype="auto")
    assert read.forward_threads == min(8, len(os.sched_getaffinity(0)))
    monkeypatch.setattr(StageSettings, "_division", None)
    read = settings(tmp_path, {"TESSERA_DEVICE": "cuda"}).read(VisionSettings)
    assert (read.device, read.runner, read.dtype, read.infer_batch_size) == ("cuda", "graph", "bfloat16", 16)
    assert read.forward_threads == 1


def test_a_fingerprint_changes_with_all_that_answers_depend_on(tmp_path):
    """Only a deterministic server's with the weights themselves, which take time to read."""
    (tmp_path / "models").mkdir()
    (folder := tmp_path / "weights").mkdir()
    header = (2).to_bytes(8, "little") + b"{}"

    def of(content, deterministic=True, **environment):
        (folder / "model.safetensors").write_bytes(header + content)
        said = {f"TESSERA_{name}": value for name, value in environment.items()} | {"TESSERA_CHECKPOINT": str(folder)}
        return fingerprint(settings(tmp_path, said), EngineConfig(deterministic=deterministic)).split(".")

    first = of(b"one")
    assert [len(part) for part in first] == [8, 8, 8, 13] and of(b"one") == first
    assert of(b"one", LANGUAGE_MODEL_MAX_SEQUENCES="7", PREPROCESS_MAX_IMAGES="3") == first
    changed = {"LANGUAGE_MODEL_KV_CACHE_DTYPE": "fp8", "PREPROCESS_RESIZE": "fast", "THREADS": "5"}
    for name, value in changed.items():
        assert [a == b for a, b in zip(of(b"one", **{name: value}), first)] == [True, True, False, True], name
    assert [a == b for a, b in zip(of(b"two"), first)] == [False, True, True, True]
    fast = of(b"one", deterministic=False)
    assert fast[3] == "fast" and of(b"two", deterministic=False) == fast != of(b"three", deterministic=False)


@pytest.mark.parametrize(
    ("parameters", "environment", "words"),
    [
        ({"quantization": "int3"}, {}, "is 'int3'; it must be one of checkpoint, fp8, fp8-language, fp8-v"),
        ({"cash_bytes": "1"}, {}, "vision_encoder/config.pbtxt: unknown parameter 'cash_bytes'; did you mean cache_b"),
        ({}, {"TESSERA_VISION_ENCODER_CASH_BYTES": "1"}, "unknown .*_CASH_BYTES; did you mean .*_ENCODER_CACHE_BYTES"),
        ({}, {"TESSERA_DTYP": "float16"}, "unknown environment variable TESSERA_DTYP; did you mean TESSERA_DTYPE"),
        ({}, {"TESSERA_LANGUAGE_MODLE_WEIGHTS": "x"}, "unknown environment variable TESSERA_LANGUAGE_MODLE_WEIGHTS"),
        ({"vision_url": "eyes:8001"}, {"TESSERA_DEVICE": "cuda"}, "vision_url is set in config.pbtxt, where the other"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_with_what_is_allowed(
    tmp_path, monkeypatch, parameters, environment, words
):
    monkeypatch.setattr(StageSettings, "_division", None)
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, environment, **parameters).read(VisionSettings)


def test_text_inputs_must_be_single_and_utf8(backend):
    request = InferenceRequest([strings("text_input", b"a", b"b"), strings("messages", b"\xff\xfe")])
    with pytest.raises(InvalidRequest, match=r"'text_input' takes exactly one element, got 2"):
        tensors.text(request, "text_input")
    with pytest.raises(InvalidRequest, match=r"'messages' is not valid UTF-8 \(byte 0\)"):
        tensors.text(request, "messages")
    assert tensors.text(request, "absent") is None


def test_an_unexpected_error_leaks_nothing(backend):
    failure = error_response("preprocess", OSError("/secret/path went away")).error()
    assert failure.code() == "INTERNAL" and failure.message().startswith("INTERNAL: preprocess failed")
    assert "secret" not in failure.message() and any("secret" in line for line in backend.logged)


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


def exits(code: int) -> None:
    raise SystemExit(code)


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


@pytest.mark.parametrize(("final", "times"), [(True, 1), (False, 2)])
def test_a_last_response_that_finds_no_memory_ends_the_process(backend, monkeypatch, final, times):
    """The real sender takes itself for closed then, and the client would wait for ever."""
    request = InferenceRequest([], "r1")
    refuse(request, times)
    monkeypatch.setattr(os, "_exit", exits)
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
    outbox.close()
    assert fine == [[2]] and any("gone" in line for line in backend.logged)


def test_the_package_s_log_lines_reach_the_server_s_log(backend):
    write_to_server_log("language_model")
    child = logging.getLogger("tessera.engine.process.main")
    child.info("cache: %d blocks", 7)
    child.exception("a step failed", exc_info=RuntimeError("the card melted"))
    assert backend.logged[0] == "language_model: cache: 7 blocks"
    assert backend.logged[1].startswith("language_model: a step failed\nRuntimeError") and len(backend.logged) == 2


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


def test_float32_rows_arrive_bit_for_bit_and_narrow_ones_as_bfloat16():
    rows = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))[::2]  # not contiguous
    rows[0, 0], rows[1, 1] = 1e-40, torch.inf
    sent = packed(rows)
    assert (sent.dtype, sent.shape) == (torch.bfloat16, (3, 20)) and sent.is_contiguous()
    assert torch.equal(unpacked(sent, 10), rows)
    for dtype in (torch.bfloat16, torch.float16):
        sent = packed(rows.to(dtype))
        assert sent.dtype == torch.bfloat16 and torch.equal(sent, rows.to(dtype).bfloat16())
        assert unpacked(sent, 10) is sent


def test_a_process_ends_once_its_gpu_is_lost_and_says_why(monkeypatch, capfd):
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    end_process_if_lost()
    stream = SimpleNamespace(query=lambda: False)  # busy
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(os, "_exit", exits)
    end_process_if_lost()
    stream.query = fail
    with pytest.raises(SystemExit, match="^1$"):
        end_process_if_lost()
    told = r"the GPU is lost to process \d+, which ends: CUDA error: device-side assert triggered\n"
    assert re.fullmatch(told, capfd.readouterr().err)


FAULTS = """
import resource, sys
import numpy as np
from tessera import heaps
if sys.argv[1] == "kept":
    heaps.keep_freed()
for _ in range(10):
    parts = [np.ones(3 << 20, np.uint8) for _ in range(4)]
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_a_pictures_memory_is_the_next_ones():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 4 * (3 << 20) // 4096
    assert faults("kept") < faults("left alone") - 5 * pages
