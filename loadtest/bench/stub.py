"""Cold starts of a stage and a burst each, without a GPU: does its process, or the server's, die?

`make bench NAME=stub` starts a toy stage in a real tritonserver over and over, for ``--minutes``, and asks it at once,
by 96 requests at a time, beside pings, metrics and the log. Its answers are tensors on a GPU that is host memory
(stub/fake_cuda.c, compiled by gcc), for what kills happens where tritonserver shares its pool of GPU memory with a
stage; the window there is widened to ``--window-us``. ``--without-warm-up`` shows the deaths that
tritonserver/gpu_pool.py averts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server, ServerStartError

SOURCES = Path(__file__).resolve().parent / "stub_stage"
IN_FLIGHT = 96
STANDSTILL_S = 10.0
CONFIG = """
name: "stub" backend: "python" max_batch_size: 64
input [
  { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] allow_ragged_batch: true optional: true },
  { name: "PING" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "STAMPS" data_type: TYPE_INT64 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 0 }
"""
WARM_UP = """
model_warmup [ {
  name: "gpu_pool" batch_size: 1
  inputs { key: "PING" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
} ]
"""


def tensor(name: str, values: np.ndarray, kind: str) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, values.shape, kind)
    made.set_data_from_numpy(values)
    return made


def options(folder: Path, window_us: int, warm_up: bool) -> ServerOptions:
    """A repository of the stage alone, and the CUDA that is none."""
    library = folder / "libcuda.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(SOURCES / "fake_cuda.c"), "-pthread"]
    subprocess.run(command, check=True)
    model = folder / "models" / "stub"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text((SOURCES / "model.py").read_text())
    (model / "config.pbtxt").write_text(CONFIG + (WARM_UP if warm_up else ""))
    environment = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "STUB_WINDOW_US": str(window_us),
        "STUB_RENEW_S": "0.001",
    }
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    flags = (f"--cuda-memory-pool-byte-size=0:{256 << 20}",)
    return ServerOptions(
        folder / "models", log_path=folder / "log", environment=environment, extra_flags=flags, **ports
    )


def burst(server: Server, requests: int) -> tuple[int, str | None]:
    """(answers, what went wrong)."""
    failed: list[str] = []
    answers = 0
    slots = threading.Semaphore(IN_FLIGHT)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def take(result: grpcclient.InferResult | None, error: Exception | None) -> None:
            nonlocal answers
            if result is not None and np.array_equal(result.as_numpy("OUT"), np.ones((1, 16), np.float32)):
                answers += 1
            else:
                failed.append(str(error or "a wrong answer"))
            slots.release()

        question = tensor("IN", np.zeros((1, 16), np.uint8), "UINT8")
        ping = tensor("PING", np.array([["alive?"]], np.object_), "BYTES")
        for number in range(requests + IN_FLIGHT):
            if not slots.acquire(timeout=STANDSTILL_S):
                return answers, server.failure() or "a standstill"
            if number < requests:
                client.async_infer("stub", [question if number % 8 else ping], take)
    return answers, server.failure() or (failed[0] if failed else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=1000, help="of each burst")
    parser.add_argument("--window-us", type=int, default=3000)
    parser.add_argument("--without-warm-up", action="store_true")
    given = parser.parse_args()
    begun, starts, answers = time.monotonic(), 0, 0
    deaths: list[str] = []
    while time.monotonic() < begun + 60 * given.minutes:
        answered = 0
        wrong: str | None
        with tempfile.TemporaryDirectory() as folder:
            server = Server(options(Path(folder), given.window_us, not given.without_warm_up))
            try:
                server.start(attempts=1)
                answered, wrong = burst(server, given.requests)
            except ServerStartError as error:
                wrong = str(error)
            finally:
                server.stop()
        starts, answers = starts + 1, answers + answered
        if wrong:
            deaths.append(wrong)
            print(f"start {starts}: {wrong}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begun
    print(json.dumps({"starts": starts, "deaths": len(deaths), "answers": answers, "seconds": round(seconds)}))
    return 1 if deaths else 0
