"""What the servers are at while they start, stage by stage, as their logs have it: a table in a terminal, else a line
for each stage that is loaded. tritonserver answers no request before all models are loaded, so there is nothing to ask.

Why a server did not start: what its model repository lacks, and what its log says.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tessera.errors import ConfigError
from tessera.launcher.settings import SHARED_MEMORY, config_file, read_config
from tessera.settings.stages import STAGES

LOADING = re.compile(r'"loading: ([^:"]+):\d+"')
LOADED = re.compile(r"successfully loaded '([^']+)'")
NOTE = re.compile(r'^(?:[IWE]\d{4} \S+ \d+ \S+\] )?"?(\w+): (.*?)"?$')
QUIET_S = 30.0
"""Without a terminal, a stage that still loads after this long is named again, each time."""


@dataclass
class Row:
    """A model under way, or loaded after ``seconds``. ``note``: what it said last in the log."""

    began: float
    seconds: float | None = None
    note: str = ""


class Progress:
    """Any thread may call its methods. Shows nothing from :meth:`end` on: a server that is started again later is
    another matter. What it costs is paid while tritonserver loads: it is told of a log that is being read anyway."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._rows: dict[tuple[str, str], Row] = {}
        self._read: dict[str, int] = {}
        self._lock = threading.RLock()
        self._live: Any = None
        self._begun = self._ended = False
        self._said = time.monotonic()

    def read(self, server: str, log: str) -> None:
        """Takes note of what the log of ``server``, whole as it is now, has more than at the last call."""
        now = time.monotonic()
        with self._lock:
            if self._ended:
                return
            self._begin()
            if len(log) < self._read.get(server, 0):  # of a start after a crash
                self._rows = {key: row for key, row in self._rows.items() if key[0] != server}
                self._read[server] = 0
            end = log.rfind("\n") + 1
            for line in log[self._read.get(server, 0) : end].splitlines():
                if match := LOADING.search(line):
                    self._rows[server, match[1]] = Row(now)
                elif match := LOADED.search(line):
                    self._loaded(server, match[1], now)
                elif (match := NOTE.search(line)) and (row := self._rows.get((server, match[1]))):
                    row.note = match[2]
            self._read[server] = end
            if self._live is None and now - self._said >= QUIET_S:
                for key, row in self._rows.items():
                    if row.seconds is None:
                        self._line(f"{name(*key)} has been loading for {now - row.began:.0f} s", row.note)

    def gateway(self, ready: bool) -> None:
        """That it is being started, or is ready."""
        with self._lock:
            if ready:
                self._loaded("", "gateway", time.monotonic())
            else:
                self._rows["", "gateway"] = Row(time.monotonic())

    def end(self) -> None:
        """Leaves what is shown as it is. Harmless when called again."""
        with self._lock:
            self._ended = True
            live, self._live = self._live, None
        if live is not None:
            live.stop()  # outside the lock: it waits for a thread that draws a last time

    def _loaded(self, server: str, stage: str, now: float) -> None:
        row = self._rows.setdefault((server, stage), Row(now))
        row.seconds, row.note = now - row.began, ""
        if self._live is None and stage in STAGES and not self._ended:  # fronts and ensemble take no time
            self._line(f"{name(server, stage)} loaded in {row.seconds:.1f} s")

    def _line(self, text: str, note: str = "") -> None:
        self._said = time.monotonic()
        print(f"tessera: {text}{note and f' ({note})'}", file=self._stream, flush=True)

    def _begin(self) -> None:
        """Draws from now on, in a terminal that can. rich is imported here, when the server is already on its way."""
        if self._begun:
            return
        self._begun = True
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            if console.is_interactive:  # not a dumb one
                # What else is said meanwhile goes above the table, but stays in a file that it was sent to.
                here = sys.stdout.isatty()
                self._live = Live(
                    get_renderable=self._table, console=console, refresh_per_second=8, redirect_stdout=here
                )
                self._live.start()

    def _table(self) -> Any:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        for how in ({}, {"no_wrap": True}, {"justify": "right"}, {"no_wrap": True, "style": "dim"}):
            table.add_column(**how)
        now = time.monotonic()
        with self._lock:
            for key, row in self._rows.items():
                under_way = row.seconds is None
                mark = Spinner("line") if under_way and not self._ended else Text(" " if under_way else "+", "green")
                spent = now - row.began if row.seconds is None else row.seconds
                table.add_row(mark, name(*key), f"{spent:.1f} s", Text(row.note, overflow="ellipsis"))
        return table


def name(server: str, stage: str) -> str:
    """A stage's, with its server's in front where there are several."""
    return f"{server}: {stage}" if server else stage


FAILED_MODEL = re.compile(r"failed to load '([^']+)' version \d+: (?:\w+(?: \w+)?: )?(.*)")
MISSING_FILE = re.compile(r"Failed to preinitialize Python stub: (.*'([^']*?)/\d+/[^/']+'.*)")
POLL_FAILED = re.compile(r"Poll failed for model directory '([^']+)': (.*)")
LOCATION = re.compile(r"\bAt:\s*(\S+\(\d+\): \S+)")
SHARED_MEMORY_FULL = re.compile(r"(?:initialize shared memory key|increase the shared memory pool size)")
IN_USE = re.compile(r"failed to start (\w+) service: .*Socket '([^']+)' already in use")
FAULT = re.compile(r'^(?:error: |E\d{4} \S+ \d+ \S+\] (?="failed))')


def check_repository(repository: Path, config_name: str | None = None) -> None:
    """Raises ConfigError for a repository without models, or a Python model without its file.

    The second is checked because tritonserver 2.51 does not report it: it hangs in its start.
    """
    if not repository.is_dir():
        raise ConfigError(f"no model repository: {repository} is not a folder (--model-repository)")
    models = sorted(path for path in repository.iterdir() if (path / "config.pbtxt").is_file())
    if not models:
        raise ConfigError(f"no models in {repository}: a model is a folder with a config.pbtxt (--model-repository)")
    for model in models:
        config = read_config(config_file(repository, model.name, config_name))
        if config.backend != "python":
            continue
        name = config.default_model_filename or "model.py"
        versions = [path for path in model.iterdir() if path.is_dir() and path.name.isdigit()]
        if not versions:
            raise ConfigError(f"model {model.name!r} has no version: make the folder {model / '1'} with {name} in it")
        for version in versions:
            if not (version / name).is_file():
                raise ConfigError(f"model {model.name!r} has no model file: {version / name} is missing")


def failed_models(log: str) -> dict[str, str]:
    """Model name -> one-line reason, for every model that the log says failed to load."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        if match := FAILED_MODEL.search(line):
            found[match.group(1)] = one_line(match.group(2))
        elif match := MISSING_FILE.search(line):
            found[Path(match.group(2)).name] = one_line(match.group(1))
        elif match := POLL_FAILED.search(line):
            found[Path(match.group(1)).name] = one_line(match.group(2))
    return found


def explain_log(log: str) -> str | None:
    """One line that says why the server with this log failed, or None if the log does not show it."""
    if SHARED_MEMORY_FULL.search(log):
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
        return (
            f"shared memory is too small: {SHARED_MEMORY} has {free} MB free and each Python process needs its "
            "region there; enlarge it (docker run --shm-size=2g)"
        )
    if match := IN_USE.search(log):
        return f"{match.group(2)} is already in use ({match.group(1)} service)"
    if models := failed_models(log):
        return "; ".join(f"model {name!r} failed to load: {reason}" for name, reason in models.items())
    faults = [line for line in log.splitlines() if FAULT.match(line)]
    # tritonserver's last word ("creating server: ... failed") says less than the error logged before it.
    for line in sorted(faults, key=lambda line: line.startswith("error: ")):
        return one_line(FAULT.sub("", line))
    for line in log.splitlines():
        if "unrecognized option" in line or "error while loading shared libraries" in line:
            return line.strip()
    return None


def one_line(reason: str) -> str:
    """A logged message on one line: escapes undone, and of a Python traceback only the innermost place."""
    text = reason.strip().strip('"').replace("\\n", "\n").replace('\\"', '"')
    message = text.partition("\n\nAt:")[0]
    place = LOCATION.search(text)
    line = " ".join(message.split())
    return f"{line} [{place.group(1)}]" if place else line
