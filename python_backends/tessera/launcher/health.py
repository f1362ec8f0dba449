"""The health of the stages, asked; and of the service, told.

A stage may hang though its process is there. It takes part if its model has the BYTES input ``PING``: it answers such a
request, whatever else it has to do, by any response without an error. A long queue or a long forward is no death: a
stage is dead when for a whole ``timeout_s`` it has neither answered nor completed any other request. The server counts
a batch's requests when the last of them is answered, which may be a minute later on a CPU; a stage that takes batches
names, as its parameter ``SIGN_OF_WORK``, the metric that changes meanwhile.

Load balancers and ``tessera status`` ask whether this service can take requests, and what is wrong if not. The page is
the launcher's own, because tritonserver itself stays "ready" over dead stages.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import HTTPHandler, OpenerDirector, Request

from tessera.launcher.options import listen
from tessera_wire.tensors import local_address

SERVER = "tritonserver"  # the name under which the server itself is asked
QUESTION_TIMEOUT_S = 5.0
# Asks the server itself, whatever proxy the environment names.
DIRECTLY = OpenerDirector()
DIRECTLY.add_handler(HTTPHandler())


# The language model's output `cascade` in an event of /generate_stream.
CASCADE = re.compile(rb'"cascade":\s*("(?:[^"\\]|\\.)*")')


class NoAnswer(Exception):
    """A request that brought nothing useful; ``status`` is the HTTP status if there was one."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Ping:
    """One stage's ping as an HTTP request: a POST of ``body``, or a GET for the server itself. ``sign``: of work."""

    stage: str
    path: str
    body: bytes | None = None
    sign: str | None = None


@dataclass(eq=False)
class Pinger:
    """Pings every stage of one running server, one at a time a stage, each on its own thread.

    ``metrics_url``: of the server's metrics page.
    """

    url: str
    metrics_url: str
    models: Sequence[str]
    interval_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._answers: dict[str, tuple[float, float]] = {}
        self._failure: str | None = None
        self.cascade: dict[str, Any] = {}
        """What a stage says in the answer to its ping of how a plan is followed: ``alarm`` (why it does not hold any
        more), ``cascade_audits``, ``cascade_disagreements`` (docs/cascade.md)."""

    def start(self) -> Pinger:
        """Finds out which models take pings and begins. Raises NoAnswer if the server does not say."""
        configurations = (self._json(f"/v2/models/{model}/config") for model in self.models)
        pings = [made for configuration in configurations if (made := ping_of(configuration))]
        for ping in [Ping(SERVER, "/v2/health/live"), *pings]:
            threading.Thread(target=self._watch, args=(ping,), name=f"ping-{ping.stage}", daemon=True).start()
        return self

    def stop(self) -> None:
        """No ping is sent any more; one under way is not waited for."""
        self._stopped.set()

    def failure(self) -> str | None:
        """Which stage is dead, or None."""
        return self._failure

    def last(self, stage: str) -> tuple[float | None, float | None]:
        """(round trip in milliseconds, age in seconds) of the stage's last answer, rounded; Nones before the first."""
        if stage not in self._answers:
            return None, None
        milliseconds, answered = self._answers[stage]
        return round(milliseconds, 2), round(time.monotonic() - answered, 1)

    def _watch(self, ping: Ping) -> None:
        alive = time.monotonic()
        while not self._stopped.is_set():
            asked = time.monotonic()
            work = None
            try:
                work = self._work(ping)
                answer = request(self.url + ping.path, self.timeout_s, ping.body)
                alive = time.monotonic()
                if told := CASCADE.search(answer):
                    self.cascade = json.loads(json.loads(told[1]) or "{}")
                self._answers[ping.stage] = ((alive - asked) * 1e3, alive)
            except NoAnswer as error:
                if self._excused(ping, error, work):
                    alive = time.monotonic()
                elif time.monotonic() - alive >= self.timeout_s:
                    self._failure = f"{ping.stage} has not answered for {self.timeout_s:g} s ({error})"
                    return
            # A ping that waited long for nothing is followed by the next one soon.
            self._stopped.wait(max(0.1, self.interval_s - (time.monotonic() - asked)))

    def _excused(self, ping: Ping, error: NoAnswer, before: tuple[int, list[str]] | None) -> bool:
        """Whether the stage has done other work meanwhile, or is not loaded at all (somebody's decision)."""
        try:
            after = self._work(ping)
        except NoAnswer as later:
            return later.status == 400
        return before is not None and after != before

    def _work(self, ping: Ping) -> tuple[int, list[str]] | None:
        """How many requests the stage has answered so far, and its signs of work; None for the server itself."""
        if ping.stage == SERVER:
            return None
        statistics = self._json(f"/v2/models/{ping.stage}/stats")["model_stats"]
        count = sum(int(version["inference_stats"]["success"]["count"]) for version in statistics)
        signs: list[str] = []
        if ping.sign:
            with suppress(NoAnswer):  # a server may go without its metrics
                page = request(self.metrics_url, min(QUESTION_TIMEOUT_S, self.timeout_s)).decode()
                signs = [line for line in page.splitlines() if line.startswith(ping.sign)]
        return count, signs

    def _json(self, path: str) -> Any:
        return json.loads(request(self.url + path, min(QUESTION_TIMEOUT_S, self.timeout_s)))


def request(url: str, timeout_s: float, body: bytes | None = None) -> bytes:
    """Body of a 200 answer to a GET, or to a POST of ``body``; raises NoAnswer.

    One connection a call: an idle one would delay the server's end.
    """
    try:
        asked = Request(url, body, {"Content-Type": "application/json"})
        with DIRECTLY.open(asked, timeout=timeout_s) as response:
            data: bytes = response.read()
    except TimeoutError:
        raise NoAnswer("no answer") from None
    except (OSError, HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error
    if response.status != 200:
        raise NoAnswer(" ".join(data[:200].decode("utf-8", "replace").split()), response.status)
    return data


def ping_of(configuration: dict[str, Any]) -> Ping | None:
    """The ping of the model with this configuration (as /v2/models/NAME/config has it); None if it takes none."""
    if not any(i["name"] == "PING" and i["data_type"] == "TYPE_STRING" for i in configuration.get("input", [])):
        return None
    sign = configuration.get("parameters", {}).get("SIGN_OF_WORK", {}).get("string_value")
    # Of all endpoints the one that takes decoupled models too, and an answer without a response.
    path = f"/v2/models/{configuration['name']}/generate_stream"
    return Ping(configuration["name"], path, json.dumps({"PING": "alive?"}).encode(), sign)


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
    page: Page = {
        "state": pages[worst]["state"],
        "since": pages[worst]["since"],
        "restarts": sum(page["restarts"] for page in pages.values()),
        "reason": f"{worst}: {pages[worst]['reason']}" if pages[worst]["reason"] else "",
    }
    if alarms := [f"{name}: {each['alarm']}" for name, each in pages.items() if "alarm" in each]:
        page["alarm"] = "; ".join(alarms)
    for count in ("cascade_audits", "cascade_disagreements"):
        if counted := sum(each.get(count, 0) for each in pages.values()):
            page[count] = counted
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

    with ThreadingHTTPServer((host, port), partial(PageHandler, report), bind_and_activate=False) as listener:
        listener.socket.close()
        listener.socket = listen(host, port, "--health-port")
        threading.Thread(target=listener.serve_forever, args=(0.1,), name="health", daemon=True).start()
        try:
            yield f"http://{local_address(host, listener.socket.getsockname()[1])}/healthz"
        finally:
            listener.shutdown()


class PageHandler(BaseHTTPRequestHandler):
    """One request to the health port."""

    timeout = 60.0  # a client that says nothing is hung up on; one that is merely slow, on a busy machine, is not
    server_version, sys_version = "tessera", ""

    def __init__(self, report: Callable[[], Page], *of_the_listener: Any) -> None:
        self.report = report
        super().__init__(*of_the_listener)

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client went away; any other fault is told
            super().handle()

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
