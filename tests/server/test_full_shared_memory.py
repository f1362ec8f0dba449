"""A /dev/shm of its own, too small or full: the server's fault, said at the start and told apart from the client's."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_servers import Launched

from tessera_client import Client, Retry, Unavailable

MAY_MOUNT = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a /dev/shm of its own"),
]
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


def memory_of(size: str) -> list[str]:
    """A command before another one, which then has so much of /dev/shm and leaves this machine's alone."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]


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


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_what_finds_no_room_is_the_servers_fault_and_is_retried(tmp_path):
    large_file = png(np.random.default_rng(0).integers(0, 255, (1800, 1800, 3), np.uint8))
    small_file_of_large_pixels = png(np.full((1700, 1700, 3), 200, np.uint8))
    service = Launched(REPOSITORY, tmp_path / "log", through=memory_of("64m"))
    try:
        doors = [service.url("grpc"), "http://" + service.url("http")]
        with full(service):
            for door in doors:
                with Client(door, retry=Retry(attempts=1)) as client:
                    assert client.ask(None, "Hello?", max_tokens=2, timeout=30).text  # fits into what is there
                    for picture in (large_file, small_file_of_large_pixels):
                        with pytest.raises(Unavailable, match="/dev/shm is full: enlarge it"):
                            client.ask(picture, "What?", max_tokens=2, timeout=30)
        with Client(doors[0], retry=Retry(attempts=600, max_delay=0.1)) as client, ThreadPoolExecutor(1) as pool:
            with full(service):
                answer = pool.submit(client.ask, large_file + b"\0", "What?", max_tokens=2)
                time.sleep(0.5)
            assert answer.result(60).text
    finally:
        service.process.terminate()
        _, said = service.process.communicate(timeout=30)
    assert "/dev/shm has 64 MB free, and 6 Python processes should have 2048 MB there" in said


def test_a_dev_shm_that_can_never_do_is_refused_at_once(tmp_path):
    service = Launched(REPOSITORY, tmp_path / "log", wait=False, through=memory_of("8m"))
    _, said = service.process.communicate(timeout=60)
    assert service.process.returncode == 1 and not (tmp_path / "log").exists()
    assert "/dev/shm has 8 MB free, and the 6 Python processes need at least 12 MB there" in said
