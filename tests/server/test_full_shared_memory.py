"""A /dev/shm of its own, too small or full: the server's fault, said at the start and told apart from the client's."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from PIL import Image
from toy_servers import Launched, wait_until

from tessera_client import Client, Retry, Unavailable

MAY_MOUNT = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a /dev/shm of its own"),
]
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
ONCE = Retry(attempts=1)
# Answers with as many numbers as asked for, from a sender's thread, as the stages do.
NUMBERS = """
import numpy as np
import triton_python_backend_utils as pb_utils
from tessera.tritonserver import tensors
from tessera.tritonserver.responder import Channel, Outbox
from tessera.tritonserver.responder import Responder

class TritonPythonModel:
    def initialize(self, args):
        self.outbox = Outbox("toy", threads=1)

    def execute(self, requests):
        for request in requests:
            job = Responder(request), int(tensors.array(request, "IN")[0])
            self.outbox.post(Channel(self.answer), job)

    def answer(self, jobs):
        for responder, count in jobs:
            response = pb_utils.InferenceResponse([tensors.output("OUT", np.zeros(count, np.int32))])
            responder.send(response, final=True)
"""
CONFIG = """
name: "numbers" backend: "python" max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""


def memory_of(size: str) -> list[str]:
    """A command before another one, which then has so much of /dev/shm and leaves this machine's alone."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]


@contextmanager
def launched(repository: Path, folder: Path, size: str) -> Iterator[Launched]:
    service = Launched(repository, folder / "log", through=memory_of(size))
    try:
        yield service
    finally:
        service.process.terminate()
        service.process.communicate(timeout=30)


@contextmanager
def full(service: Launched) -> Iterator[None]:
    """While nothing is left of the server's /dev/shm."""
    shared = Path(f"/proc/{service.process.pid}/root/dev/shm")
    with open(shared / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(shared).free - 100_000)
    try:
        yield
    finally:
        (shared / "filler").unlink()


def noise(side: int) -> bytes:
    """A picture whose file is as large as its pixels."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def flat(side: int) -> bytes:
    """A small file with large pixels."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "PNG")
    return file.getvalue()


def test_what_finds_no_room_is_the_servers_fault_and_is_retried(tmp_path):
    wide, small_file = noise(1800), flat(1700)
    with launched(REPOSITORY, tmp_path, "64m") as service:
        doors = [service.url("grpc"), "http://" + service.url("http")]
        with full(service):
            for door in doors:
                with Client(door, retry=ONCE) as client:
                    assert client.ask(None, "Hello?", max_tokens=2, timeout=30).text  # fits into what is there
                    for picture in (wide, small_file):
                        with pytest.raises(Unavailable, match="/dev/shm is full: enlarge it"):
                            client.ask(picture, "What?", max_tokens=2, timeout=30)
        with Client(doors[0], retry=Retry(attempts=600, max_delay=0.1)) as client:
            answers = []
            asking = threading.Thread(target=lambda: answers.append(client.ask(wide + b"\0", "What?", max_tokens=2)))
            with full(service):
                asking.start()
                time.sleep(0.5)
            asking.join(60)
        assert answers[0].text
        service.process.terminate()
        _, said = service.process.communicate(timeout=30)
    assert "/dev/shm has 64 MB free, and 6 Python processes should have 2048 MB there" in said


def test_an_answer_that_finds_no_room_ends_its_process_and_not_its_clients_patience(tmp_path):
    (tmp_path / "models" / "numbers" / "1").mkdir(parents=True)
    (tmp_path / "models" / "numbers" / "1" / "model.py").write_text(NUMBERS)
    (tmp_path / "models" / "numbers" / "config.pbtxt").write_text(CONFIG)
    with launched(tmp_path / "models", tmp_path, "64m") as service:

        def ask(count: int) -> int:
            tensor = grpcclient.InferInput("IN", [1], "INT32")
            tensor.set_data_from_numpy(np.array([count], np.int32))
            with grpcclient.InferenceServerClient(service.url("grpc")) as client:
                return client.infer("numbers", [tensor], client_timeout=60).as_numpy("OUT").size

        def asked(count: int) -> bool:
            try:
                return ask(count) == count
            except grpcclient.InferenceServerException as error:
                assert "Deadline" not in str(error)
                return False

        assert asked(10)
        with full(service):
            assert asked(10) and not asked(1_000_000)
        assert wait_until(lambda: asked(1_000_000), 30)


def test_a_dev_shm_that_can_never_do_is_refused_at_once(tmp_path):
    service = Launched(REPOSITORY, tmp_path / "log", wait=False, through=memory_of("8m"))
    _, said = service.process.communicate(timeout=60)
    assert service.process.returncode == 1 and not (tmp_path / "log").exists()
    assert "/dev/shm has 8 MB free, and the 6 Python processes need at least 12 MB there" in said
