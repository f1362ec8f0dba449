"""The HTTP door beside the servers (clients/tessera_gateway), as a child that is restarted when it dies.

The launcher knows its command line alone: the server's package stands below the clients and imports nothing of them.
"""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from tessera.errors import ConfigError, TesseraError
from tessera.launcher.options import listen
from tessera.launcher.process import Child, Restarts

NEEDS = ("tessera_gateway", "fastapi", "uvicorn")
READY_S = 60.0
STOP_S = 10.0
"""That the child may take to end, beside the drain that it was told (``DRAIN``)."""
DRAIN = "--drain="
RESTART_WINDOW_S = 300.0


class Gateway:
    """The child. ``say(message, error)`` gets a line when it is restarted; ``options`` are the child's own.

    Raises ConfigError where its packages are not installed, the port is taken, or the options cannot work.
    """

    def __init__(self, host: str, port: int, say: Callable[[str, bool], None], options: Sequence[str] = ()) -> None:
        missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"the gateway needs {', '.join(missing)}, not installed here; --openai-port 0 for none")
        listen(host, port, "--openai-port").close()  # now, not after the servers
        if options:
            _check(options)
        self.url = ""
        """Where it listens, once it is started."""
        self.pid = 0
        self._host, self._port, self._say, self._options = host, port, say, options
        self._child: Child | None = None
        self._command: list[str] = []
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gateway", daemon=True)

    def start(self, grpc: Sequence[str], metrics: Sequence[str]) -> None:
        """Returns when it answers. Raises TesseraError where it does not."""
        self._command = [
            *(sys.executable, "-m", "tessera_gateway.cli", "--with-parent"),
            *("--host", self._host, "--port", str(self._port)),
            *("--url", ",".join(grpc), "--metrics", ",".join(metrics)),
            *self._options,
        ]
        self._spawn()
        self._watcher.start()

    def stop(self) -> None:
        """Returns when it is gone; harmless when it was never started."""
        self._stopping.set()
        if self._child is not None:
            drain_s = sum(float(each[len(DRAIN) :]) for each in self._options if each.startswith(DRAIN))
            self._child.stop(STOP_S + drain_s)
        if self._watcher.ident is not None:
            self._watcher.join()

    def _spawn(self) -> None:
        self._child = child = Child(self._command)
        self.pid = child.pid
        if self._stopping.is_set():  # meanwhile: stop() may have ended the one before
            child.kill()
        line = child.hear(READY_S)
        if "ready: " not in line:
            child.stop(STOP_S)
            raise TesseraError(f"the gateway did not start (--openai-port {self._port}, 0 for none)")
        self.url = line.rpartition("ready: ")[2].strip()

    def _watch(self) -> None:
        restarts = Restarts(RESTART_WINDOW_S)
        while True:
            assert self._child is not None
            status = self._child.wait()
            self._child.stop(STOP_S)  # its workers too
            if self._stopping.is_set():
                return
            assert status is not None
            how = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
            self._say(f"the gateway ended: {how}; restarting", True)
            if self._stopping.wait(restarts.next_pause()):
                return
            try:
                self._spawn()
                self._say(f"the gateway is ready again: {self.url}", False)
            except (TesseraError, OSError):  # it has ended, or there is no memory for one: once more round
                pass


def _check(options: Sequence[str]) -> None:
    """Raises ConfigError in the gateway's own words where it could not start with them."""
    command = [sys.executable, "-m", "tessera_gateway.cli", "--check", *options]
    trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if trial.returncode != 0:
        said = trial.stderr.strip().splitlines() or [f"it ended with exit code {trial.returncode}"]
        raise ConfigError(f"the gateway: {said[-1].removeprefix('tessera gateway: ')}")
