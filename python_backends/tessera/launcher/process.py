"""The launcher's children, and above all one running tritonserver: start, wait until it is ready, watch, stop.

A server's child process is :mod:`tessera.launcher.guard`, which runs it and cleans up behind it however this process
ends. Here is what a caller sees: addresses, process ids, and one clear reason when something fails.

Both a guard and the gateway are told to stop by the end of their standard input, so they also stop when the launcher is
killed. Each has a session of its own: Ctrl-C in a terminal reaches the launcher, which then ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tessera.errors import TesseraError
from tessera.launcher import guard
from tessera.launcher.health import NoAnswer, request
from tessera.launcher.installation import STUB
from tessera.launcher.options import ServerOptions, guard_job, hold_ports
from tessera.launcher.settings import ServerSetup
from tessera.launcher.starting import check_repository, explain_log, failed_models, log_path, remove_old_logs

# tritonserver ends one second after its exit timeout at the latest, if it ends by itself at all.
GRACE_BEYOND_EXIT_TIMEOUT_S = 1.5
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
START_ATTEMPTS = 3
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
WEIGHTS = re.compile(r'^tessera_weight_bytes\{.*?stage="([^"]*)",weights="([^"]*)".*?\} (\S+)', re.M)
INSTANCE_NUMBERS = re.compile(r"_\d+_\d+$")


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
            with contextlib.suppress(BrokenPipeError):
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.status

    def stop(self, seconds: float = 0.0) -> list[str]:
        """Tells it to stop, kills what is left of its session after ``seconds``, and returns the lines that nobody
        has heard. Harmless when it has ended; may be called again."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
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


class ServerStartError(TesseraError):
    """The server did not become ready; the message is one line that says why."""


class ServerCrashed(ServerStartError):
    """tritonserver itself crashed in its start, and no model is known to be at fault."""


class Server:
    """A tritonserver and its stubs, as a context manager.

    ``with Server(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)) as server:`` gives a server
    whose models are all ready, and leaves no process, shared memory or temporary folder behind. It belongs to one
    thread; others may call :meth:`abort` and look at the properties.
    """

    def __init__(self, options: ServerOptions):
        self.options = options
        """With the ports of the last start, picked or not."""
        self.models: tuple[str, ...] = ()
        self.setup = ServerSetup({}, [], "cpu")
        """The settings of the last start."""
        self.pid = 0
        """Process id of tritonserver."""
        self.mps = False
        """Whether the stages share the GPU by an MPS daemon of this server."""
        self.cleaned_up: tuple[str, ...] = ()
        """What the last start found of servers whose launcher and guard were killed, and removed."""
        self.crashes: tuple[str, ...] = ()
        """What kept the last start from working at the first attempt: crashes of tritonserver itself."""
        self.stages: dict[str, int] = {}
        """Model instance -> process id of the stubs that belong to the ready server, the dead ones too."""
        self.weights: dict[str, str] = {}
        """Stage -> what its weights are, and how many MiB of them, as it said when it was ready."""
        self.log_path = log_path(options)
        self.watch_log: Callable[[str], None] = lambda log: None
        """Called during a start with the log so far, again and again."""
        self._guard: Child | None = None
        self.shm_prefix = ""
        """What the names of this server's files in /dev/shm begin with."""
        self._end: dict[str, Any] = {}
        """What the guard said when the server had ended; empty while it runs, and where the guard was killed."""
        self._unloaded: set[str] = set()
        self._runs = 0
        self._aborted = threading.Event()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def grpc_url(self) -> str:
        return self.options.local(self.options.grpc_port)

    @property
    def http_url(self) -> str:
        """Base address for HTTP, with scheme and without a slash at the end."""
        return f"http://{self.options.local(self.options.http_port)}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.local(self.options.metrics_port)}/metrics"

    def start(self, attempts: int = START_ATTEMPTS) -> Server:
        """Starts the server and returns when every model is ready. The next start has the same ports, picked or not.

        A tritonserver that crashes, as it does once in a while for no fault of a model, is started again, up to
        ``attempts`` starts.
        Raises ConfigError or InstallationError before anything runs, ServerStartError (after cleaning up) when the
        server fails to become ready within ``ready_timeout_s``, or :meth:`abort` was called.
        """
        check_repository(self.options.model_repository, self.options.model_config_name)
        self.setup = self.options.set_up()
        self.cleaned_up = tuple(guard.sweep())
        self.crashes = ()
        asked = self.options
        while True:
            try:
                with contextlib.ExitStack() as held:
                    self.options = hold_ports(asked, held)
                self._spawn()
                self._wait_ready()
                return self
            except ServerStartError as error:
                # A picked port was free a moment ago; what took it since will not take the next one too.
                taken = 0 in asked.ports.values() and "already in use" in str(error)
                attempts -= 1
                if not attempts or not (taken or isinstance(error, ServerCrashed)):
                    raise
                if not taken:  # the next attempt puts this one's log aside
                    self.crashes += (str(error).replace(str(self.log_path), f"{self.log_path}.1"),)
            except BaseException:  # a signal's exception too
                self.stop()
                raise

    def abort(self) -> None:
        """Ends a start that is under way in another thread, and any later one. A running server runs on."""
        self._aborted.set()

    def kill(self) -> None:
        """As :meth:`stop`, but at once: the requests of a dead stage hang until the server ends."""
        if self._guard is not None:
            self._guard.tell("kill")
        self.stop()

    def stop(self) -> None:
        """Stops the server; returns when it and all it started are gone (10 s at most). Harmless when stopped."""
        process = self._guard
        if process is None:
            return
        self._read_end(process.stop(self._grace_s + 3.0))
        if process.status and self.pid:  # the guard was killed, so its work is done here
            guard.remove_if_gone(self.shm_prefix)
        self.pid = 0
        self._guard = None  # last, so that a stop that a signal interrupted can be taken up again

    def stub_pids(self) -> dict[str, int]:
        """Model instance ("preprocess_0_1") -> process id of the living Python stubs."""
        found = {}
        for pid in guard.descendants(self.pid) if self.pid else ():
            arguments = command_line(pid)
            # Before it loads a model the backend tries the stub without any.
            if len(arguments) > 1 and Path(arguments[0]).name == STUB:
                found[arguments[-2]] = pid  # in this server's order
        return found

    def failure(self) -> str | None:
        """Why this server can no longer serve, or None while it can. Cheap: meant to be called twice a second.

        A stub that died is never restarted by this server, and its model stays "ready": so it counts as failure.
        The stub of a model that somebody unloads or loads again is missing for a good reason, and does not.
        """
        if self._guard is None:
            return "not started"
        if not command_line(self.pid):
            self._guard.wait(5.0)  # it is cleaning up; the stubs it ends are not the reason
        if self._guard.status is not None:
            return f"tritonserver ended: {self._last_words(self._guard)}"
        gone = {name: pid for name, pid in self.stages.items() if not command_line(pid)}
        if gone or self._unloaded:
            models, living = self._models(), self.stub_pids()  # in this order a model that is ready has its stub
            missing = [
                f"{name!r} (process {pid})"
                for name, pid in gone.items()
                if name not in living and (models is None or models.get(model_of(name)))
            ]
            if missing:
                return f"the Python process of {', '.join(missing)} died"
            self._unloaded = (self._unloaded | gone.keys()) - living.keys()
            self.stages = living
        return None

    @property
    def _grace_s(self) -> float:
        return self.options.exit_timeout_s + GRACE_BEYOND_EXIT_TIMEOUT_S

    def _spawn(self) -> None:
        self.shm_prefix = f"tessera-{uuid.uuid4().hex[:12]}-"
        self._end = {}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.options.log_path is None:
            remove_old_logs(self.log_path.parent)
        if self._runs and self.log_path.exists():  # how the last run ended is worth keeping
            self.log_path.replace(self.log_path.with_name(self.log_path.name + ".1"))
        self._runs += 1
        with open(self.log_path, "wb") as log:
            job = guard_job(self.options, self.setup, self.shm_prefix, self._grace_s)
            self._guard = Child([sys.executable, "-I", "-S", guard.__file__], log)
        self._guard.tell(json.dumps(job))
        line = self._guard.hear()
        if not line:
            raise ServerStartError(self._fail(f"could not run {job['command'][0]}"))
        begun = json.loads(line)
        self.pid, self.mps = begun["pid"], begun["mps"]

    def _wait_ready(self) -> None:
        """Polls until all models are ready; raises ServerStartError and cleans up when that will not happen."""
        assert self._guard is not None
        deadline = time.monotonic() + self.options.ready_timeout_s
        while time.monotonic() < deadline:
            if self._aborted.is_set():
                self.kill()
                raise ServerStartError("stopped during the start")
            if self._guard.status is not None:
                words = self._last_words(self._guard)
                kind = ServerCrashed if self._crashed() else ServerStartError
                raise kind(self._fail(f"tritonserver ended: {words}"))
            # A model that fails can hang the server in its start for ever, so its log is watched as well.
            log = self.read_log()
            self.watch_log(log)
            if failed_models(log):
                self._guard.wait(1.0)  # others may fail too
                raise ServerStartError(self._fail("a model failed to load"))
            # The metrics service starts last, and its failure ends the server.
            models, page = self._models(), self._answer(self.metrics_url)
            has_no_page = "--allow-metrics=false" in self.options.extra_flags
            if models and all(models.values()) and (page is not None or has_no_page):
                self.watch_log(self.read_log())
                self.models = tuple(sorted(models))
                self.stages, self._unloaded = self.stub_pids(), set()
                found = WEIGHTS.findall((page or b"").decode())
                self.weights = {stage: f"{words}, {float(size) / 2**20:,.0f} MiB" for stage, words, size in found}
                return
            time.sleep(0.05)
        raise ServerStartError(self._fail(f"not ready after {self.options.ready_timeout_s:g} s (--ready-timeout)"))

    def _models(self) -> dict[str, bool] | None:
        """Model that was to be loaded -> whether it is ready; None if the server does not answer."""
        index = self._answer(f"{self.http_url}/v2/repository/index", b"")
        if index is None:
            return None
        return {entry["name"]: entry["state"] == "READY" for entry in json.loads(index) if entry.get("state")}

    def _answer(self, url: str, body: bytes | None = None) -> bytes | None:
        """Body of a 200 answer, else None."""
        if self._aborted.is_set():
            return None
        try:
            return request(url, 2.0, body)
        except NoAnswer:
            return None

    def read_log(self) -> str:
        """What the server has written so far, on standard output and error."""
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def _fail(self, otherwise: str) -> str:
        """Stops the server and returns the one line: the log's reason, or ``otherwise``."""
        self.stop()
        reason = explain_log(self.read_log()) or otherwise
        if self.mps and re.search("CUDA|MPS", reason):
            reason += "; --no-mps does without CUDA's MPS, in case that is at fault"
        return f"{reason} (log: {self.log_path})"

    def _last_words(self, process: Child) -> str:
        """How the server ended, for a guard that has ended."""
        self._read_end(process.stop())
        why, status = self._end.get("why"), self._end.get("status")
        if why is not None or status is None:
            return why or "its guard process was killed"
        code = os.waitstatus_to_exitcode(status)
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _crashed(self) -> bool:
        """Whether the server that ended crashed by itself: by such a signal, and its log blames nothing."""
        status = self._end.get("status")
        return status is not None and os.WTERMSIG(status) in CRASHES and explain_log(self.read_log()) is None

    def _read_end(self, lines: Sequence[str]) -> None:
        """Takes the guard's last line, where there is one."""
        for line in lines:
            self._end = json.loads(line)


def command_line(pid: int) -> list[str]:
    """Arguments of a living process; [] if it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []


def model_of(instance: str) -> str:
    """The model of a model instance: "preprocess_0_1" is one of "preprocess"."""
    return INSTANCE_NUMBERS.sub("", instance)
