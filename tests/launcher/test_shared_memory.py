"""What a server asks of /dev/shm, and what it says where that is less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.errors import ConfigError
from tessera.launcher import settings
from tessera.launcher.settings import MB, Regions, ServerSetup, python_processes, regions, shortage

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


@pytest.fixture
def free(monkeypatch):
    """Sets how many MB are free."""

    def set_free(megabytes: int) -> None:
        usage = SimpleNamespace(free=megabytes * MB)
        monkeypatch.setattr(settings.shutil, "disk_usage", lambda path: usage)

    return set_free


def test_every_instance_of_a_python_model_is_a_process():
    assert python_processes(REPOSITORY, None, ServerSetup({}, [], "cpu")) == 6
    assert python_processes(REPOSITORY, "tensorrt", ServerSetup({}, [], "cuda")) == 5  # the plan is none
    assert python_processes(REPOSITORY, None, ServerSetup({}, [], "cuda", instances=8)) == 12
    assert python_processes(REPOSITORY, None, ServerSetup({}, [], "cuda", only=("vision_encoder",))) == 1


@pytest.mark.parametrize(
    "megabytes, processes, servers, start",
    [(2048, 6, 1, 64), (2047, 6, 1, 1), (64, 6, 1, 1), (2500, 30, 1, 1), (3000, 30, 1, 64), (4000, 6, 2, 1)],
)
def test_regions_are_small_where_large_ones_would_not_fit(free, megabytes, processes, servers, start):
    free(megabytes)
    assert regions(processes, servers).start == start * MB
    assert (shortage(processes, servers) is None) == (start > 1)


def test_too_little_is_said_with_what_is_wanted(free):
    free(64)
    assert shortage(6) == (
        "/dev/shm has 64 MB free, and 6 Python processes should have 2048 MB there: they begin with 1 MB each, and "
        "what finds no more is refused as UNAVAILABLE; enlarge it (docker run --shm-size=2g)"
    )
    assert "and 24 Python processes should have 8192 MB" in (shortage(6, servers=4) or "")


def test_what_can_never_do_is_refused(free):
    free(11)
    words = "11 MB free, and the 6 Python processes need at least 12 MB there; enlarge it"
    with pytest.raises(ConfigError, match=words):
        shortage(6)
    with pytest.raises(ConfigError, match=words):
        regions(6)
    free(12)
    assert regions(6) == Regions(6, MB, MB)
