"""A process of this package beside a stage's own, and the connection to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from tessera.errors import ConfigError


def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Runs ``module``, whose one argument is the file descriptor of its end of the connection.

    When either process dies, the other one's end of the connection raises EOFError or OSError. Raises ConfigError where
    there is no interpreter.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [_python(), "-m", module, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    return process, Connection(ours.detach())


def _python() -> str:
    """The interpreter of this environment; inside the server's stub sys.executable is not one."""
    for candidate in (Path(sys.prefix) / "bin" / "python3", Path(sys.executable)):
        if candidate.name.startswith("python") and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ConfigError(f"no python3 in {sys.prefix} to run a stage's process with")
