"""All servers of one launcher: each has a supervisor on a thread of its own, and is restarted without the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tessera.errors import TesseraError
from tessera.launcher.gateway import Gateway
from tessera.launcher.health import Health, ServiceHealth
from tessera.launcher.options import ServerOptions
from tessera.launcher.process import Server
from tessera.launcher.starting import Progress
from tessera.launcher.supervisor import Supervision, Supervisor


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
