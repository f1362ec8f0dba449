"""Keeps one server serving: starts it, watches it, and starts it again when a stage or the server itself dies.

All servers of one launcher: each has a supervisor on a thread of its own, and is restarted without the others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tessera.errors import TesseraError
from tessera.launcher.child import Restarts
from tessera.launcher.gateway import Gateway
from tessera.launcher.health import Health, ServiceHealth
from tessera.launcher.options import ServerOptions
from tessera.launcher.ping import SERVER, NoAnswer, Pinger
from tessera.launcher.process import Server, command_line, model_of
from tessera.launcher.starting import Progress
from tessera.settings.schema import check, setting


@dataclass(frozen=True)
class Supervision:
    """How a server is watched, and how often it may be restarted. Raises ConfigError that names the option."""

    restart: bool = True
    max_restarts: int = setting(5, name="--max-restarts", least=0)
    """More than this many within ``restart_window_s`` are a crash loop, which nobody mends by restarting."""
    restart_window_s: float = setting(300.0, name="--restart-window", least=0.001)
    look_interval_s: float = 0.5
    ping_interval_s: float = setting(5.0, name="--ping-interval", least=0.001)
    ping_timeout_s: float = setting(60.0, name="--ping-timeout", least=0.001)
    health_port: int = setting(8003, name="--health-port", least=0, most=65535)

    def __post_init__(self) -> None:
        check(self, "tessera serve")


class Stopped(Exception):
    """Somebody called :meth:`Supervisor.stop`."""


@dataclass(eq=False)
class Supervisor:
    """Runs ``server`` until it cannot be kept up or is told to stop, in the thread that calls :meth:`run`.

    ``say(message, error)`` gets one line for each thing that happens but a start that worked: for each of these
    ``ready(seconds)`` is called.
    """

    server: Server
    supervision: Supervision
    health: Health
    say: Callable[[str, bool], None]
    ready: Callable[[float], None]

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._pinger: Pinger | None = None
        self._restarts = Restarts(self.supervision.restart_window_s)
        self.health.details = self.details

    def run(self) -> str | None:
        """Returns why it gave up, or None after :meth:`stop`; nothing of the server is left then.

        Raises what Server.start does if even the first start fails.
        """
        try:
            self._start()
            while True:
                reason: str | None = self._watch()
                while reason is not None:
                    self._kill()
                    if verdict := self._verdict(reason):
                        self.health.enter("failed", verdict)
                        return verdict
                    reason = self._restart(reason)
        except Stopped:
            return None
        except TesseraError as error:
            if self._stopped.is_set():
                return None
            self.health.enter("failed", str(error))
            raise
        finally:
            if self._pinger is not None:
                self._pinger.stop()
            self.server.stop()

    def stop(self) -> None:
        """Makes :meth:`run`, in its own thread, stop the server in order and return."""
        self.health.enter("stopping")
        self._stopped.set()
        self.server.abort()

    def details(self) -> dict[str, Any]:
        """The part of the health page that is looked up when asked for."""
        server, pinger = self.server, self._pinger
        stages = {SERVER: server.pid, **server.stages()} if server.pid else server.stages()
        return {
            "grpc": server.grpc_url,
            "http": server.http_url,
            "metrics": server.metrics_url,
            "mps": server.mps,
            "weights": server.weights,
            "stages": {name: stage_report(name, pid, pinger) for name, pid in stages.items()},
        }

    def _start(self, *attempts: int) -> None:
        began = time.monotonic()
        server = self.server.start(*attempts)
        if server.cleaned_up:
            self.say(f"removed {len(server.cleaned_up)} leftovers of a server that was killed", False)
        for crash in server.crashes:
            self.say(f"{crash}; started again", True)
        supervision = self.supervision
        times = supervision.ping_interval_s, supervision.ping_timeout_s
        pinger = Pinger(server.http_url, server.metrics_url, server.models, *times)
        try:
            self._pinger = pinger.start()
        except NoAnswer as error:
            server.kill()
            raise TesseraError(f"the server was ready, and then did not answer: {error}") from error
        self.health.enter("ready")
        self.ready(time.monotonic() - began)

    def _watch(self) -> str:
        """Returns the reason when the server can no longer serve."""
        assert self._pinger is not None
        while (reason := self.server.failure() or self._pinger.failure()) is None:
            self._sleep(self.supervision.look_interval_s)
        return reason

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Stopped

    def _kill(self) -> None:
        # Not "ready" from now on, whatever comes next.
        self.health.enter("restarting" if self.supervision.restart else "failed")
        if self._pinger is not None:
            self._pinger.stop()
        self.server.kill()

    def _verdict(self, reason: str) -> str | None:
        """Why not to restart after this failure; None if there is nothing against it."""
        if not self.supervision.restart:
            return reason
        if (recent := self._restarts.recent()) >= self.supervision.max_restarts:
            return f"{reason}; giving up after {recent} restarts within {self.supervision.restart_window_s:g} s"
        return None

    def _restart(self, reason: str) -> str | None:
        """One attempt; returns why it failed, or None when the server is ready again."""
        pause = self._restarts.next_pause()
        self.health.restarted()
        self.health.enter("restarting", reason)
        later = f" in {pause:g} s" if pause else ""
        self.say(f"{reason}; restarting{later} (restart {self.health.restarts})", True)
        self._sleep(pause)
        try:
            self._start(1)  # more would come without a pause
        except TesseraError as error:
            if self._stopped.is_set():
                raise Stopped from error
            return str(error)
        return None


def stage_report(name: str, pid: int, pinger: Pinger | None) -> dict[str, Any]:
    """One stage on the health page. Instances of a model share its pings, for the server shares these out."""
    last = pinger.last(name if name == SERVER else model_of(name)) if pinger else None
    return {
        "alive": bool(command_line(pid)),
        "pid": pid,
        "last_ping_ms": None if last is None else round(last[0], 2),
        "last_ping_age_s": None if last is None else round(last[1], 1),
    }


class Fleet:
    """Runs a server for each of ``options``, which are one or have names; ``say(message, error)`` gets its lines.

    ``gateway``, if any, is started when all servers are ready for the first time; ``progress`` is shown until then.
    """

    def __init__(
        self,
        options: Sequence[ServerOptions],
        supervision: Supervision,
        say: Callable[[str, bool], None],
        gateway: Gateway | None = None,
        progress: Progress | None = None,
    ):
        self.servers = [Server(each) for each in options]
        self._progress = progress or Progress()
        for server in self.servers:
            server.watch_log = partial(self._progress.read, server.options.name)
        self.health = ServiceHealth({server.options.name: Health() for server in self.servers})
        self._supervision = supervision
        self._say = say
        self._supervisors = [self._supervisor(server) for server in self.servers]
        self._threads: list[threading.Thread] = []
        self._gateway = gateway
        self._ends: queue.SimpleQueue[tuple[Server, str | Exception] | None] = queue.SimpleQueue()
        """Why each server ended; None once all are ready for the first time."""
        self._began = 0.0
        self._lock = threading.Lock()
        self._starting = set(self.health.servers)

    def run(self) -> str:
        """Starts all servers at once and returns why none, or without restarts one, can be kept up.

        Raises TesseraError if the first start of any, or of the gateway, fails. However it ends, :meth:`stop` is to
        follow.
        """
        self._began = time.monotonic()
        for supervisor in self._supervisors:
            name = supervisor.server.options.name
            thread = threading.Thread(target=self._keep, args=(supervisor,), name=f"supervisor-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        running = len(self._supervisors)
        while True:
            event = self._ends.get()
            if event is None:
                self._open()
                continue
            server, end = event
            if isinstance(end, TesseraError):
                raise TesseraError(named(server, str(end))) from end
            if isinstance(end, Exception):
                raise end
            reason = f"{named(server, end)} (log: {server.log_path})"
            running -= 1
            if not running or not self._supervision.restart:
                return reason
            self._say(f"stopped: {reason}; the other servers go on", True)

    def stop(self) -> None:
        """Stops the gateway, whose last answers the servers still give, then all servers at the same time (10 s)."""
        self._progress.end()
        if self._gateway is not None:
            self._gateway.stop()
        for supervisor in self._supervisors:
            supervisor.stop()
        for thread in self._threads:
            if thread.ident is not None:  # a signal may have come before it was started
                thread.join()

    def _supervisor(self, server: Server) -> Supervisor:
        return Supervisor(
            server,
            self._supervision,
            self.health.servers[server.options.name],
            lambda message, error: self._say(named(server, message), error),
            lambda seconds: self._ready(server, seconds),
        )

    def _keep(self, supervisor: Supervisor) -> None:
        try:
            if (reason := supervisor.run()) is not None:
                self._ends.put((supervisor.server, reason))
        except Exception as error:  # to the thread that waits in run()
            self._ends.put((supervisor.server, error))

    def _ready(self, server: Server, seconds: float) -> None:
        """One line when all are ready for the first time, then one for each that is ready again."""
        with self._lock:
            again = not self._starting
            self._starting.discard(server.options.name)
            if again:
                self._say(named(server, self._addresses([server], seconds)), False)
            elif not self._starting:
                self._ends.put(None)

    def _open(self) -> None:
        """Starts the gateway, and says where everything is."""
        if self._gateway is not None:
            servers = self.servers
            self._progress.gateway(ready=False)
            self._gateway.start([each.grpc_url for each in servers], [each.metrics_url for each in servers])
            self._progress.gateway(ready=True)
        self._progress.end()
        self._say(self._addresses(self.servers, time.monotonic() - self._began), False)

    def _addresses(self, servers: Sequence[Server], seconds: float) -> str:
        door = f"openai {self._gateway.url}, " if self._gateway is not None and servers is self.servers else ""
        return (
            f"ready in {seconds:.1f} s: grpc {','.join(each.grpc_url for each in servers)}, "
            f"http {','.join(each.http_url for each in servers)}, "
            f"metrics {','.join(each.metrics_url for each in servers)}, health {self.health.url}, "
            f"{door}"
            f"models {' '.join(servers[0].models)}, log {','.join(str(each.log_path) for each in servers)}"
        )


def named(server: Server, message: str) -> str:
    """The message with the server's name in front, if it has one."""
    return f"{server.options.name}: {message}" if server.options.name else message
