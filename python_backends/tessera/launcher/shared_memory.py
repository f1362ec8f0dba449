"""How much of /dev/shm a server takes: each Python process of it has a region there, which grows and never shrinks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import ConfigError
from tessera.launcher.settings import PREPROCESS, ServerSetup, config_file, read_config

SHARED_MEMORY = Path("/dev/shm")
MB = 1 << 20
ROOM = 2048 * MB  # for the pictures of some dozens of requests


@dataclass(frozen=True)
class Regions:
    """Of the processes of one server; ``start`` and ``growth`` are bytes of each.

    A larger start saves growing at the first big picture; a small /dev/shm (64 MB is Docker's default) must still hold
    them all.
    """

    processes: int
    start: int
    growth: int

    @property
    def least(self) -> int:
        """Bytes that all of them take after their first growth."""
        return self.processes * (self.start + self.growth)


ROOMY, MODEST = (64 * MB, 32 * MB), (1 * MB, 1 * MB)


def python_processes(repository: Path, config_name: str | None, setup: ServerSetup) -> int:
    """How many stubs a server of this repository has."""
    count = 0
    for name in (file.parent.name for file in repository.glob("*/config.pbtxt")):
        config = read_config(config_file(repository, name, config_name))
        if config.backend == "python" and name in (setup.only or [name]):
            own = setup.instances if name == PREPROCESS else None
            count += own or sum(group.count or 1 for group in config.instance_group) or 1
    return count


def regions(processes: int, servers: int = 1) -> Regions:
    """What each region of a server is to have, by what is free now and shared by the servers that start.

    Raises ConfigError where they do not fit.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free // servers
    roomy, modest = Regions(processes, *ROOMY), Regions(processes, *MODEST)
    if free < modest.least:
        raise ConfigError(
            f"{SHARED_MEMORY} has {servers * free // MB} MB free, and the {servers * processes} Python processes need "
            f"at least {servers * modest.least // MB} MB there; {remedy(servers)}"
        )
    return roomy if free >= max(ROOM, roomy.least) else modest


def shortage(processes: int, servers: int = 1) -> str | None:
    """A line for the user who starts the servers, where they will do with less than they should have.

    Raises ConfigError where they do not fit at all.
    """
    if regions(processes, servers) != (modest := Regions(processes, *MODEST)):
        return None
    free = shutil.disk_usage(SHARED_MEMORY).free // MB
    wanted = servers * max(ROOM, Regions(processes, *ROOMY).least) // MB
    return (
        f"{SHARED_MEMORY} has {free} MB free, and {servers * processes} Python processes should have {wanted} MB "
        f"there: they begin with {modest.start // MB} MB each, and what finds no more is refused as UNAVAILABLE; "
        f"{remedy(servers)}"
    )


def remedy(servers: int) -> str:
    return f"enlarge it (docker run --shm-size={2 * servers}g)"
