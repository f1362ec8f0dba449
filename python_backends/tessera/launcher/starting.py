"""What the servers are at while they start, stage by stage, as their logs have it: a table in a terminal, else a line
for each stage that is loaded. tritonserver answers no request before all models are loaded, so there is nothing to ask.

Why a server did not start: what its model repository lacks, and what its log says, and where that is.
"""

import os
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from tessera.errors import ConfigError
from tessera.launcher.options import ServerOptions
from tessera.launcher.settings import SHARED_MEMORY, config_file, read_config
from tessera.settings.stages import STAGES
from tessera.settings.user_cache import cache_folder

LOADING = re.compile(r'"loading: ([^:"]+):\d+"')
LOADED = re.compile(r"successfully loaded '([^']+)'")
NOTE = re.compile(r'^(?:[IWE]\d{4} \S+ \d+ \S+\] )?"?(\w+): (.*?)"?$')
KEPT_LOGS = 20
QUIET_S = 30.0
"""Without a terminal, a stage that still loads after this long is named again, each time."""


class Progress:
    """Any thread may call its methods. Shows nothing from :meth:`end` on: a server that is started again later is
    another matter. What it costs is paid while tritonserver loads: it is told of a log that is being read anyway."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._table: Any = None
        self._rows: dict[tuple[str, str], Any] = {}
        """A task of the table for each model under way or loaded; its ``note``: what it said last in the log."""
        self._read: dict[str, int] = {}
        self._lock = threading.RLock()
        self._ended = False
        self._said = time.monotonic()

    def read(self, server: str, log: str) -> None:
        """Takes note of what the log of ``server``, whole as it is now, has more than at the last call."""
        now = time.monotonic()
        with self._lock:
            if self._ended:
                return
            self._begin()
            if len(log) < self._read.get(server, 0):  # of a start after a crash
                for key in [key for key in self._rows if key[0] == server]:
                    self._table.remove_task(self._rows.pop(key).id)
                self._read[server] = 0
            end = log.rfind("\n") + 1
            for line in log[self._read.get(server, 0) : end].splitlines():
                if match := LOADING.search(line):
                    self._loading(server, match[1])
                elif match := LOADED.search(line):
                    self._loaded(server, match[1])
                elif (match := NOTE.search(line)) and (row := self._rows.get((server, match[1]))):
                    self._table.update(row.id, note=match[2])
            self._read[server] = end
            if self._table.disable and now - self._said >= QUIET_S:
                for row in self._rows.values():
                    if not row.finished:
                        self._line(f"{row.description} has been loading for {row.elapsed:.0f} s", row.fields["note"])

    def gateway(self, ready: bool) -> None:
        """That it is being started, or is ready."""
        with self._lock:
            self._begin()
            if ready:
                self._loaded("", "gateway")
            else:
                self._loading("", "gateway")

    def end(self) -> None:
        """Leaves what is shown as it is. Harmless when called again."""
        with self._lock:
            self._ended = True
        if self._table is not None:
            self._table.stop()  # outside the lock: it waits for a thread that draws a last time

    def _loading(self, server: str, stage: str) -> Any:
        self._table.add_task(f"{server}: {stage}" if server else stage, total=1, note="")
        row = self._rows[server, stage] = self._table.tasks[-1]
        return row

    def _loaded(self, server: str, stage: str) -> None:
        row = self._rows.get((server, stage)) or self._loading(server, stage)
        self._table.stop_task(row.id)
        self._table.update(row.id, completed=1, note="")
        if self._table.disable and stage in STAGES and not self._ended:  # fronts and ensemble take no time
            self._line(f"{row.description} loaded in {row.elapsed:.1f} s")

    def _line(self, text: str, note: str = "") -> None:
        self._said = time.monotonic()
        print(f"tessera: {text}{note and f' ({note})'}", file=self._stream, flush=True)

    def _begin(self) -> None:
        """Draws from now on, in a terminal that can. rich is imported here, when the server is already on its way."""
        if self._table is not None:
            return
        from rich.console import Console
        from rich.progress import Progress as Table
        from rich.progress import SpinnerColumn, TextColumn

        console = Console(file=self._stream)
        columns = (
            SpinnerColumn("line", finished_text="[green]+"),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.elapsed:.1f} s", justify="right"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
        )
        self._table = Table(
            *columns,
            console=console,
            get_time=lambda: time.monotonic(),
            # What else is said meanwhile goes above the table, but stays in a file that it was sent to.
            redirect_stdout=sys.stdout.isatty(),
            disable=not (self._stream.isatty() and console.is_interactive),  # a file, a dumb terminal
        )
        self._table.start()


def log_path(options: ServerOptions) -> Path:
    """Where a server with these options logs; servers of one launcher differ by their names."""
    path = options.log_path or cache_folder() / "logs" / f"tritonserver-{os.getpid()}.log"
    return path.with_name(f"{path.stem}-{options.name}{path.suffix}") if options.name else path


def remove_old_logs(folder: Path) -> None:
    """Leaves the newest in the folder of logs that nobody asked for."""
    with suppress(FileNotFoundError):  # another start removes them at this moment
        for old in sorted(folder.glob("*.log*"), key=os.path.getmtime)[:-KEPT_LOGS]:
            old.unlink()


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
