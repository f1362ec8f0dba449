"""A process that the launcher keeps beside itself: how it is started and stopped, and how soon it is started again.

Both the guard of a server and the gateway are told to stop by the end of their standard input, so they also stop when
the launcher is killed. Each has a session of its own: Ctrl-C in a terminal reaches the launcher, which then ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0


class Child:
    """A running program. Both sides speak by lines; ``log`` takes its standard error."""

    def __init__(self, command: Sequence[str], log: IO[bytes] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def status(self) -> int | None:
        """None while it runs, then its exit code, or minus the signal that killed it."""
        return self._process.poll()

    def tell(self, line: str) -> None:
        """Writes a line to it, which is lost where it has ended or was told to stop."""
        if not self._input.closed:
            with suppress(BrokenPipeError):
                self._input.write(f"{line}\n")
                self._input.flush()

    def hear(self, seconds: float | None = None) -> str:
        """Its next line, "" at the end. It is killed where that takes longer than ``seconds``."""
        if seconds is None:
            return self._output.readline()
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        line = self._output.readline()
        timer.cancel()
        return line

    def wait(self, seconds: float | None = None) -> int | None:
        """Its :attr:`status` when it has ended, or ``seconds`` have passed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def stop(self, seconds: float = 0.0) -> list[str]:
        """Tells it to stop, kills what is left of its session after ``seconds``, and returns the lines that nobody
        has heard. Harmless when it has ended; may be called again."""
        with suppress(BrokenPipeError):
            self._input.close()
        self.wait(seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._output.closed:
            return []
        with self._output:
            return self._output.readlines()


class Restarts:
    """The recent restarts of one child: the more there were within ``window_s``, the longer the pause before another.

    The first comes at once.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began: list[float] = []

    def recent(self) -> int:
        """How many there were within the window."""
        since = time.monotonic() - self._window_s
        self._began = [began for began in self._began if began >= since]
        return len(self._began)

    def next_pause(self) -> float:
        """Counts one more; returns how many seconds to wait before it."""
        recent = self.recent()
        self._began.append(time.monotonic())
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (recent - 1)) if recent else 0.0
