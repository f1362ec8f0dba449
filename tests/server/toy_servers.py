"""Small model repositories, and `tessera serve` as a process, for the tests of this folder."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server.http_door import post

import tessera
from tessera.launcher.guard import descendants
from tessera.launcher.process import command_line

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
# As the stages do, it answers pings; "sleep" takes half a second.
ECHO = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ping = pb_utils.get_input_tensor_by_name(request, "PING")
        asked = pb_utils.get_input_tensor_by_name(request, "IN") if ping is None else ping
        if ping is None and asked.as_numpy()[0] == b"sleep":
            time.sleep(0.5)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", asked.as_numpy())])
"""
# Sends as many answers as asked for; for -1 sends one and never ends the request.
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.open = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            wanted = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            for i in range(abs(wanted)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.int32))]))
            if wanted < 0:
                self.open.append(sender)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def starting(code: str) -> str:
    """A model that only starts, by this code."""
    return f"import time\nclass TritonPythonModel:\n    def initialize(self, args):\n        {code}\n"


BROKEN = starting('raise ValueError("weights of layer 3 are missing")')
SLOW = starting("time.sleep(600)")

# The first this many starts of the server end as by its own fault; {marks} counts them.
CRASHING = """
import os, pathlib, signal, time

class TritonPythonModel:
    def initialize(self, args):
        marks = pathlib.Path({marks!r})
        marks.open("a").write("x")
        if len(marks.read_text()) <= {crashes}:
            os.kill(os.getppid(), signal.SIGABRT)
            time.sleep(600)
"""

# Is stopped by a signal for more than two seconds, in its start and in its first request.
STARVED = """
import os, subprocess, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.starved = False
        self.starve()

    def execute(self, requests):
        if not self.starved:
            self.starved = True
            self.starve()
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]

    def starve(self):
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 2.5; kill -CONT {pid}"])
        time.sleep(1)
"""


def add_model(repository: Path, name: str, code: str, dtype: str, decoupled: bool = False) -> None:
    """A model with one input and one output; one whose code knows pings gets the input for them."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(code)
    inputs = [("IN", dtype), *([("PING", "TYPE_STRING")] if "PING" in code else [])]
    (repository / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n'
        + "".join(f'input [{{ name: "{n}" data_type: {kind} dims: [1] optional: true }}]\n' for n, kind in inputs)
        + f'output [{{ name: "OUT" data_type: {dtype} dims: [1] }}]\n'
        + "instance_group [{ count: 1 kind: KIND_CPU }]\n"
        + ("model_transaction_policy { decoupled: true }\n" if decoupled else "")
    )


class Launched:
    """`tessera serve` as a process of its own, by way of the command ``through``, with what its first line says.

    Killed where nobody has ended it: the guard ends its server then, while other tests run.
    """

    def __init__(self, repository: Path, log: Path, *flags: str, wait: bool = True, through: Sequence[str] = ()):
        command = [*through, sys.executable, "-m", "tessera.launcher.cli", "--model-repository", str(repository)]
        for port in ("http", "grpc", "metrics", "health", "openai"):
            command += [f"--{port}-port", "0"]
        command += ["--log", str(log), *flags]
        environment = {**os.environ, "PYTHONPATH": str(Path(tessera.__file__).resolve().parents[1])}
        self.log, self._errors = log, Path(f"{log}.errors")
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline() if wait else ""
        self.pids = descendants(self.process.pid)  # one that has just ended has no command line
        self.server_pid = next((p for p in self.pids if "".join(command_line(p)[:1]).endswith("tritonserver")), 0)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def errors(self) -> str:
        """What it has said on standard error so far."""
        return self._errors.read_text()

    def url(self, protocol: str) -> str:
        """Address from the ready line: "host:port", without a path."""
        return self.ready_line.split(f"{protocol} ")[1].split(",")[0].removeprefix("http://").partition("/")[0]

    def health(self) -> dict[str, Any]:
        """The health page, whose status says whether it is ready."""
        try:
            status, page = post(f"http://{self.url('health')}/healthz")
        except OSError as error:
            end = f"the launcher (exit code {self.process.poll()}) said: {self.errors()}"
            raise AssertionError(f"{error}; {end}") from error
        found: dict[str, Any] = json.loads(page)
        assert status == (200 if found["state"] == "ready" else 503)
        return found

    def regions(self) -> list[str]:
        flag = next(a for a in command_line(self.server_pid) if "shm-region-prefix-name=" in a)
        return glob.glob(f"/dev/shm/{flag.rpartition('=')[2]}*")


MAY_MOUNT = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def memory_of(size: str) -> list[str]:
    """A command before another one, which then has so much of /dev/shm and leaves this machine's alone."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def is_stub(pid: int) -> bool:
    """Whether it is the process of a Python model."""
    return any(argument.endswith("/triton_python_backend_stub") for argument in command_line(pid)[:1])


def all_gone(pids: list[int]) -> bool:
    return not any(command_line(pid) for pid in pids)
