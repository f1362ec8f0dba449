"""What commands show on standard error.

Arguments that several commands have.

The health port of `tessera serve`: what it says of the service, where tritonserver itself only says "ready".
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from tessera_wire.tensors import addresses, parse_url


def console() -> Any:
    """For tables."""
    from rich.console import Console

    return Console(stderr=True)


PLAIN_S = 10.0


def _plain(what: str) -> Callable[..., None]:
    last = -math.inf

    def advance(done: int, total: int, rate: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now >= last + PLAIN_S or done == total:
            last = now
            print(f"{what}: {done} of {total}{f', {rate}' if rate else ''}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """A bar, driven by (done, total) or (done, total, how fast); the time left goes by what is done after the first.

    Where standard error is no terminal, lines: the first, the last, and one every PLAIN_S seconds.
    """
    if not console().is_terminal:
        yield _plain(what)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    description, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    columns = (description, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def advance(done: int, total: int, rate: str = "") -> None:
            if bar.tasks[0].total is None:
                bar.reset(task, total=total, completed=done, rate=rate)
            else:
                bar.update(task, completed=done, total=total, rate=rate)

        yield advance


DEFAULT_URL = "localhost:8001"


def command(commands: Any, name: str, run: Callable[[Any], int], text: str, timeout: float = 120) -> Callable[..., Any]:
    """Adds a command; returns what adds arguments to it."""
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    servers = "host:port for gRPC or http://host:port; several with commas (default: TESSERA_URL, else %(default)s)"
    parser.add_argument("--url", default=os.environ.get("TESSERA_URL", DEFAULT_URL), help=servers)
    within = "seconds a request may take (%(default)g)"
    parser.add_argument("--timeout", type=float, default=timeout, metavar="S", help=within)
    return parser.add_argument


def sampling(add: Callable[..., Any]) -> None:
    """How long answers are, and how finely pictures are cut."""
    add("--max-tokens", type=positive, metavar="N", help="longest answer in tokens")
    add("--max-tiles", type=positive, metavar="N", help="at most N tiles a picture")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def labels(text: str) -> list[str]:
    """What stands between commas."""
    return [label.strip() for label in text.split(",")]


DEFAULT_PORT = 8003


@dataclass(frozen=True, slots=True)
class StageHealth:
    """One process of the server. Times in milliseconds and seconds; None before the first answered ping."""

    name: str
    alive: bool
    pid: int
    last_ping_ms: float | None = None
    last_ping_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """What the health page says: ``state`` is starting, ready, restarting, failed or stopping.

    Of several servers it is the worst one's, whose name begins ``reason``; ``grpc`` and ``http`` hold their addresses
    with commas between, and a stage's name begins with its server's. ``weights`` says what each stage's are, ``alarm``
    what is not as it was planned of a cascade. Of its ``cascade_audits`` since the servers began, as many answers
    differed as there are ``cascade_disagreements``.
    """

    state: str
    since: str
    restarts: int
    reason: str
    grpc: str = ""
    http: str = ""
    stages: tuple[StageHealth, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    alarm: str = ""
    cascade_audits: int = 0
    cascade_disagreements: int = 0

    @property
    def ready(self) -> bool:
        """Whether the service takes requests: it says so, and every process of it lives."""
        return self.state == "ready" and all(stage.alive for stage in self.stages)

    def serves(self, port: str) -> bool:
        """Whether the page is about the server that listens on ``port``."""
        return any(address.rpartition(":")[2] == port for address in f"{self.grpc},{self.http}".split(","))


def ask(url: str, timeout: float = 2.0) -> Health | None:
    """The page at ``http://host:port[/healthz]``; None if nothing, or no server of ours, answers there."""
    import httpx

    try:
        address = httpx.URL(url if "://" in url else f"http://{url}")
        page = address.copy_with(scheme="http", port=address.port or DEFAULT_PORT, raw_path=b"/healthz")
        told = httpx.get(page, timeout=timeout, trust_env=False).json()
        stages = tuple(StageHealth(name, **about) for name, about in told["stages"].items())
        return Health(
            **{each.name: told[each.name] for each in fields(Health) if each.name in told} | {"stages": stages}
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return None


def supervised(url: str, health_url: str | None = None) -> Health | None:
    """The health page for the server at ``url``, or for the first of several; None where there is none, or it is
    another server's. ``health_url``: where it is; by TESSERA_HEALTH_URL, else port 8003 of the same host."""
    health_url = health_url or os.environ.get("TESSERA_HEALTH_URL")
    host, _, port = parse_url(addresses(url)[0])[1].rpartition(":")
    page = ask(health_url or f"http://{host}:{DEFAULT_PORT}")
    return page if page and (health_url or page.serves(port)) else None
