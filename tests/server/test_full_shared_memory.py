"""A /dev/shm of its own, too small or full: the server's fault, said at the start and told apart from the client's."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from preprocess.encoded_pictures import saved
from toy_servers import MAY_MOUNT, REPOSITORY, Launched, memory_of

from tessera_client import Client, Retry, Unavailable

pytestmark = [pytest.mark.server, pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a /dev/shm of its own")]


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


def test_what_finds_no_room_is_the_servers_fault_and_is_retried(documents: Launched) -> None:
    large_file = saved(Image.fromarray(np.random.default_rng(0).integers(0, 255, (1800, 1800, 3), np.uint8)), "PNG")
    small_file_of_large_pixels = saved(Image.fromarray(np.full((1700, 1700, 3), 200, np.uint8)), "PNG")
    doors = [documents.url("grpc"), "http://" + documents.url("http")]
    with full(documents):
        for door in doors:
            with Client(door, retry=Retry(attempts=1)) as client:
                assert client.ask(None, "Hello?", max_tokens=2, timeout=30).finish_reason  # fits into what is there
                for picture in (large_file, small_file_of_large_pixels):
                    with pytest.raises(Unavailable, match="/dev/shm is full: enlarge it"):
                        client.ask(picture, "What?", max_tokens=2, timeout=30)
    with Client(doors[0], retry=Retry(attempts=600, max_delay=0.1)) as client, ThreadPoolExecutor(1) as pool:
        with full(documents):
            answer = pool.submit(client.ask, large_file + b"\0", "What?", max_tokens=2)
            time.sleep(0.5)
        assert answer.result(60).finish_reason
    assert "/dev/shm has 64 MB free, and 6 Python processes should have 2048 MB there" in documents.errors()


def test_a_dev_shm_that_can_never_do_is_refused_at_once(tmp_path: Path) -> None:
    with Launched(REPOSITORY, tmp_path / "log", wait=False, through=memory_of("8m")) as service:
        assert service.process.wait(60) == 1 and not (tmp_path / "log").exists()
    said = "/dev/shm has 8 MB free, and the 6 Python processes need at least 12 MB there"
    assert said in service.errors()
