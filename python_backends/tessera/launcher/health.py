"""What load balancers and ``tessera status`` ask: whether this service can take requests, and what is wrong if not.

The page is the launcher's own, because tritonserver itself stays "ready" over dead stages.
"""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from tessera.launcher.options import cannot_listen, local_address

BY_GRAVITY = ("ready", "starting", "restarting", "failed", "stopping")


class Health:
    """The state of one server, read by the health port's threads while its supervisor changes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: dict[str, Any] = {"state": "starting", "since": now(), "restarts": 0, "reason": ""}
        self.details: Callable[[], dict[str, Any]] = dict
        """What else the report holds: addresses and stages, looked up when somebody asks."""

    @property
    def restarts(self) -> int:
        return int(self._page["restarts"])

    def enter(self, state: str, reason: str | None = None) -> None:
        """Changes the state, but "stopping" for no other. ``reason`` says why, and stays until there is another one."""
        if state not in BY_GRAVITY:
            raise ValueError(f"no such state: {state!r}")
        with self._lock:
            page = self._page
            if page["state"] == "stopping":
                return
            since = page["since"] if state == page["state"] else now()
            self._page = page | {"state": state, "since": since, "reason": page["reason"] if reason is None else reason}

    def restarted(self) -> None:
        with self._lock:
            self._page = self._page | {"restarts": self.restarts + 1}

    def report(self) -> tuple[bool, dict[str, Any]]:
        """(whether to send requests here, the page)."""
        page = self._page | self.details()
        dead = [name for name, stage in page.get("stages", {}).items() if not stage["alive"]]
        if page["state"] == "ready" and dead:  # the supervisor looks twice a second; the page knows at once
            page |= {"state": "failed", "since": now(), "reason": f"the process of {', '.join(dead)} died"}
        return page["state"] == "ready", page


class ServiceHealth:
    """What all servers of one launcher are together: ready if each of them is. One server alone is the service."""

    def __init__(self, servers: Mapping[str, Health]):
        self.servers = servers
        """By name."""
        self.url = ""
        """Where the page is served."""

    def report(self) -> tuple[bool, dict[str, Any]]:
        """As :meth:`Health.report`. State, since and reason are those of the server that is worst off, whose name
        begins the reason; ``servers`` has each server's own."""
        pages = {name: health.report()[1] for name, health in self.servers.items()}
        if len(pages) == 1:
            (page,) = pages.values()
            return page["state"] == "ready", page
        worst = max(pages, key=lambda name: (BY_GRAVITY.index(pages[name]["state"]), pages[name]["since"]))
        page = {
            "state": pages[worst]["state"],
            "since": pages[worst]["since"],
            "restarts": sum(page["restarts"] for page in pages.values()),
            "reason": f"{worst}: {pages[worst]['reason']}" if pages[worst]["reason"] else "",
        }
        for address in ("grpc", "http", "metrics"):
            page[address] = ",".join(each.get(address, "") for each in pages.values())
        for part in ("stages", "weights"):
            page[part] = {
                f"{name}/{stage}": about for name, each in pages.items() for stage, about in each.pop(part, {}).items()
            }
        return page["state"] == "ready", page | {"servers": pages}


class HealthPort:
    """Serves ``/healthz`` (200 or 503, JSON) and ``/livez`` (200 while the launcher lives) as a context manager.

    Raises ConfigError if the address cannot be listened on.
    """

    def __init__(self, health: ServiceHealth, host: str, port: int):
        class Page(PageHandler):
            report = staticmethod(health.report)

        class Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        try:
            self._listener = Listener((host, port), Page)
        except OSError as error:
            raise cannot_listen(host, port, "--health-port", error) from error
        health.url = f"http://{local_address(host, self._listener.server_address[1])}/healthz"

    def __enter__(self) -> HealthPort:
        threading.Thread(target=self._listener.serve_forever, args=(0.1,), name="health", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class PageHandler(http.server.BaseHTTPRequestHandler):
    """One request to the health port."""

    report: Callable[[], tuple[bool, dict[str, Any]]]
    timeout = 5.0  # a client that says nothing gets nothing
    server_version, sys_version = "tessera", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            ready, page = self.report()
            self.answer(200 if ready else 503, page)
        elif path == "/livez":
            self.answer(200, {"live": True})
        else:
            self.answer(404, {"error": "the pages here are /healthz and /livez"})

    do_HEAD = do_GET

    def answer(self, status: int, page: dict[str, Any]) -> None:
        body = json.dumps(page).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A load balancer asks every few seconds: nothing to log."""


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
