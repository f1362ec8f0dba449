"""The sweep at start: what belongs to nobody goes, what belongs to a living server or to others stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.launcher import guard


@pytest.fixture
def prefix() -> Iterator[str]:
    """The prefix of a server whose guard is alive: its lock is held until the test lets go."""
    made = f"tessera-{uuid.uuid4().hex[:12]}-"
    yield made
    for path in Path("/dev/shm").glob(f"*{made}*"):
        path.unlink()


def test_a_living_guard_keeps_its_own_and_a_dead_one_loses_all(prefix: str) -> None:
    lock = guard.take_lock(prefix)
    folder = tempfile.mkdtemp(prefix=Path(guard.ENVIRONMENTS).name.rstrip("*"), dir="/tmp")
    os.pwrite(lock, folder.encode(), 0)
    region = Path(f"/dev/shm/{prefix}{uuid.uuid4()}")
    region.touch()
    blocked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", region.name])
    try:
        assert guard.remove_if_gone(prefix) == [] and region.exists() and blocked.poll() is None
        assert os.path.isdir(folder)
        os.close(lock)  # what the kernel does when a process ends
        removed = guard.remove_if_gone(prefix)
        assert removed in ([str(region), folder], [])  # []: another server of this machine started in this moment
        assert blocked.wait(10) == -9
        assert not region.exists() and not os.path.exists(folder) and not os.path.exists(guard.lock_path(prefix))
    finally:
        blocked.kill()
        blocked.wait()


def test_the_sweep_takes_only_names_of_our_form(prefix: str, tmp_path: Path) -> None:
    """Of locks, and of the folder that one names."""
    lock = guard.take_lock(prefix)
    os.pwrite(lock, str(tmp_path).encode(), 0)
    os.close(lock)
    strange = Path("/dev/shm/.tessera-strange-lock")
    strange.touch()
    try:
        guard.sweep()
        assert strange.exists() and tmp_path.is_dir() and not os.path.exists(guard.lock_path(prefix))
    finally:
        strange.unlink()
