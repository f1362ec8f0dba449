"""What load balancers and ``tessera status`` ask: whether this service can take requests, and what is wrong if not.

The page is the launcher's own, because tritonserver itself stays "ready" over dead stages.
"""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from tessera.launcher.options import listen, local_address

BY_GRAVITY = ("ready", "starting", "restarting", "failed", "stopping")
Page = dict[str, Any]


def service_page(pages: Mapping[str, Page]) -> Page:
    """The page of all servers of one launcher, of theirs by name. One server alone is the service.

    State, since and reason are those of the server that is worst off, whose name begins the reason; ``servers`` has
    each server's own.
    """
    if len(pages) == 1:
        return next(iter(pages.values()))
    worst = max(pages, key=lambda name: (BY_GRAVITY.index(pages[name]["state"]), pages[name]["since"]))
    page = {
        "state": pages[worst]["state"],
        "since": pages[worst]["since"],
        "restarts": sum(page["restarts"] for page in pages.values()),
        "reason": f"{worst}: {pages[worst]['reason']}" if pages[worst]["reason"] else "",
    }
    for address in ("grpc", "http", "metrics"):
        page[address] = ",".join(each[address] for each in pages.values())
    for part in ("stages", "weights"):
        page[part] = {
            f"{name}/{stage}": about for name, each in pages.items() for stage, about in each.pop(part).items()
        }
    return page | {"servers": pages}


@contextmanager
def health_port(report: Callable[[], Page], host: str, port: int) -> Iterator[str]:
    """Serves ``/healthz`` (what ``report`` returns as JSON, 200 if its state is "ready", else 503) and ``/livez`` (200
    while the launcher lives); gives the address of the former.

    Raises ConfigError if the address cannot be listened on.
    """

    with Listener((host, port), partial(PageHandler, report), bind_and_activate=False) as listener:
        listener.socket.close()
        listener.socket = listen(host, port, "--health-port")
        threading.Thread(target=listener.serve_forever, args=(0.1,), name="health", daemon=True).start()
        try:
            yield f"http://{local_address(host, listener.socket.getsockname()[1])}/healthz"
        finally:
            listener.shutdown()


class Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


class PageHandler(http.server.BaseHTTPRequestHandler):
    """One request to the health port."""

    timeout = 5.0  # a client that says nothing gets nothing
    server_version, sys_version = "tessera", ""

    def __init__(self, report: Callable[[], Page], *of_the_listener: Any) -> None:
        self.report = report
        super().__init__(*of_the_listener)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            page = self.report()
            self.answer(200 if page["state"] == "ready" else 503, page)
        elif path == "/livez":
            self.answer(200, {"live": True})
        else:
            self.answer(404, {"error": "the pages here are /healthz and /livez"})

    do_HEAD = do_GET

    def answer(self, status: int, page: Page) -> None:
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
