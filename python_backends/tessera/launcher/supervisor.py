"""The launcher's one health model: what state a server is in, who observes it, who decides, who acts, who is told.

=========== ==================================================================================================
starting    until all its models answer for the first time; what fails then ends it (``failed``)
ready       observed twice a second: do its processes live (``Server.failure``), do its stages answer (``Pinger``)
restarting  one of them said why not; it is killed and started again, after pauses that grow
failed      it died too often, or may not be restarted
stopping    it was told to stop; no other state follows
=========== ==================================================================================================

:class:`Supervisor` decides and acts, for one server and on a thread of its own; what ends processes is the guard.
:class:`Fleet` has all servers of one launcher, of which each is restarted without the others, and the gateway beside
them. The health page (health.py) is told.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

from tessera.errors import TesseraError
from tessera.launcher.gateway import Gateway
from tessera.launcher.health import SERVER, NoAnswer, Page, Pinger, service_page
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Restarts, Server, command_line, model_of
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
    say: Callable[[str, bool], None]
    ready: Callable[[float], None]

    def __post_init__(self) -> None:
        self._page: Page = {"state": "starting", "since": now(), "restarts": 0, "reason": ""}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._pinger: Pinger | None = None
        self._restarts = Restarts(self.supervision.restart_window_s)

    def run(self) -> str | None:
        """Returns why it gave up, or None after :meth:`stop`; nothing of the server is left then.

        Raises what Server.start does if even the first start fails.
        """
        supervision = self.supervision
        try:
            self._start()
            reason = self._watch()
            while True:
                # Not "ready" from now on, whatever comes next.
                self._enter("restarting" if supervision.restart else "failed")
                self._stop_pings()
                self.server.kill()
                recent = self._restarts.recent()
                if supervision.restart and recent < supervision.max_restarts:
                    reason = self._restart(reason) or self._watch()
                    continue
                if supervision.restart:
                    reason += f"; giving up after {recent} restarts within {supervision.restart_window_s:g} s"
                self._enter("failed", reason)
                return reason
        except Stopped:
            return None
        except TesseraError as error:
            if self._stopped.is_set():
                return None
            self._enter("failed", str(error))
            raise
        finally:
            self._stop_pings()
            self.server.stop()

    def stop(self) -> None:
        """Makes :meth:`run`, in its own thread, stop the server in order and return."""
        self._enter("stopping")
        self._stopped.set()
        self.server.abort()

    def report(self) -> Page:
        """The server's page, its stages as they are now."""
        server, page, stages = self.server, self._page, {}
        pids = {SERVER: server.pid} if server.pid else {}
        for name, pid in (pids | server.stages).items():
            # Instances of a model share its pings, for the server shares these out.
            ms, age = self._pinger.last(name if name == SERVER else model_of(name)) if self._pinger else (None, None)
            alive = bool(command_line(pid))
            stages[name] = {"alive": alive, "pid": pid, "last_ping_ms": ms, "last_ping_age_s": age}
        dead = [name for name, stage in stages.items() if not stage["alive"]]
        if page["state"] == "ready" and dead:  # looked for twice a second; the page knows at once
            page = page | {"state": "failed", "since": now(), "reason": f"the process of {', '.join(dead)} died"}
        if self._pinger:
            page = page | {name: told for name, told in self._pinger.cascade.items() if told}
        addresses = {"grpc": server.grpc_url, "http": server.http_url, "metrics": server.metrics_url}
        return page | addresses | {"mps": server.mps, "weights": server.weights, "stages": stages}

    def _enter(self, state: str, reason: str | None = None, restarts: int = 0) -> None:
        """``reason`` says why, and stays until there is another one; ``restarts``: more of them."""
        with self._lock:
            page = self._page
            if page["state"] != "stopping":
                new = {"state": state, "restarts": page["restarts"] + restarts}
                new |= {} if state == page["state"] else {"since": now()}
                self._page = page | new | ({} if reason is None else {"reason": reason})

    def _start(self, *attempts: int) -> None:
        began = time.monotonic()
        server, supervision = self.server.start(*attempts), self.supervision
        if server.cleaned_up:
            self.say(f"removed {len(server.cleaned_up)} leftovers of a server that was killed", False)
        for crash in server.crashes:
            self.say(f"{crash}; started again", True)
        times = supervision.ping_interval_s, supervision.ping_timeout_s
        pinger = Pinger(server.http_url, server.metrics_url, server.models, *times)
        try:
            self._pinger = pinger.start()
        except NoAnswer as error:
            server.kill()
            raise TesseraError(f"the server was ready, and then did not answer: {error}") from error
        self._enter("ready")
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

    def _stop_pings(self) -> None:
        if self._pinger is not None:
            self._pinger.stop()

    def _restart(self, reason: str) -> str | None:
        """One attempt; returns why it failed, or None when the server is ready again."""
        pause = self._restarts.next_pause()
        self._enter("restarting", reason, restarts=1)
        later = f" in {pause:g} s" if pause else ""
        self.say(f"{reason}; restarting{later} (restart {self._page['restarts']})", True)
        self._sleep(pause)
        try:
            self._start(1)  # more would come without a pause
        except TesseraError as error:
            if self._stopped.is_set():
                raise Stopped from error
            return str(error)
        return None


class Fleet:
    """Runs a server for each of ``options``, which are one or have names; ``say(message, error)`` gets its lines.

    ``gateway``, if any, is started when all servers are ready for the first time; a table of it is shown until then.
    """

    def __init__(
        self,
        options: Sequence[ServerOptions],
        supervision: Supervision,
        say: Callable[[str, bool], None],
        gateway: Gateway | None = None,
    ):
        self.servers = [Server(each) for each in options]
        self.health_url = ""
        """Where the page is served."""
        self._supervision, self._say, self._gateway = supervision, say, gateway
        self._progress = Progress()
        self._supervisors = [self._supervisor(server) for server in self.servers]
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[tuple[Server, float | str | Exception]] = queue.SimpleQueue()
        """Of each server, after how many seconds it was ready, and at last why it ended."""

    def report(self) -> Page:
        """The health page."""
        return service_page({each.server.options.name: each.report() for each in self._supervisors})

    def run(self) -> str:
        """Starts all servers at once and returns why none, or without restarts one, can be kept up.

        Raises TesseraError if the first start of any, or of the gateway, fails. However it ends, :meth:`stop` is to
        follow.
        """
        began = time.monotonic()
        for supervisor in self._supervisors:
            name = f"supervisor-{supervisor.server.options.name}"
            self._threads.append(threading.Thread(target=self._keep, args=(supervisor,), name=name, daemon=True))
            self._threads[-1].start()
        running, starting = len(self.servers), set(self.servers)
        while True:
            server, event = self._events.get()
            if isinstance(event, TesseraError):
                raise TesseraError(named(server, str(event))) from event
            if isinstance(event, Exception):
                raise event
            if isinstance(event, str):
                reason = f"{named(server, event)} (log: {server.log_path})"
                running -= 1
                if not running or not self._supervision.restart:
                    return reason
                self._say(f"stopped: {reason}; the other servers go on", True)
            elif server in starting:  # one line when all are ready for the first time
                starting.remove(server)
                if not starting:
                    self._open()
                    self._say(self._addresses(self.servers, time.monotonic() - began), False)
            elif not starting:  # then one for each that is ready again
                self._say(named(server, self._addresses([server], event)), False)

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
        server.watch_log = partial(self._progress.read, server.options.name)
        return Supervisor(
            server,
            self._supervision,
            lambda message, error: self._say(named(server, message), error),
            lambda seconds: self._events.put((server, seconds)),
        )

    def _keep(self, supervisor: Supervisor) -> None:
        try:
            if (reason := supervisor.run()) is not None:
                self._events.put((supervisor.server, reason))
        except Exception as error:  # to the thread that waits in run()
            self._events.put((supervisor.server, error))

    def _open(self) -> None:
        """Starts the gateway."""
        if self._gateway is not None:
            self._progress.gateway(ready=False)
            self._gateway.start([each.grpc_url for each in self.servers], [each.metrics_url for each in self.servers])
            self._progress.gateway(ready=True)
        self._progress.end()

    def _addresses(self, servers: Sequence[Server], seconds: float) -> str:
        door = f"openai {self._gateway.url}, " if self._gateway is not None and servers is self.servers else ""
        return (
            f"ready in {seconds:.1f} s: grpc {','.join(each.grpc_url for each in servers)}, "
            f"http {','.join(each.http_url for each in servers)}, "
            f"metrics {','.join(each.metrics_url for each in servers)}, health {self.health_url}, "
            f"{door}"
            f"models {' '.join(servers[0].models)}, log {','.join(str(each.log_path) for each in servers)}"
        )


def named(server: Server, message: str) -> str:
    """The message with the server's name in front, if it has one."""
    return f"{server.options.name}: {message}" if server.options.name else message


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
