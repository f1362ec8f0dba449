"""The health port of `tessera serve`: what it says of the service, where tritonserver itself only says "ready"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
    with commas between, and a stage's name begins with its server's. ``weights`` says what each stage's are.
    """

    state: str
    since: str
    restarts: int
    reason: str
    grpc: str = ""
    http: str = ""
    stages: tuple[StageHealth, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether the service takes requests: it says so, and every process of it lives."""
        return self.state == "ready" and all(stage.alive for stage in self.stages)

    def serves(self, port: str) -> bool:
        """Whether the page is about the server that listens on ``port``."""
        return any(address.rpartition(":")[2] == port for address in f"{self.grpc},{self.http}".split(","))


def ask(url: str, timeout: float = 2.0) -> Health | None:
    """The page at ``http://host:port[/healthz]``; None if nobody, or nobody of ours, answers there."""
    import httpx

    try:
        address = httpx.URL(url if "://" in url else f"http://{url}")
        page = address.copy_with(scheme="http", port=address.port or DEFAULT_PORT, raw_path=b"/healthz")
        return _health(httpx.get(page, timeout=timeout, trust_env=False).json())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return None


def _health(page: dict[str, Any]) -> Health:
    stages = tuple(StageHealth(name, **about) for name, about in page["stages"].items())
    known = {each.name: page[each.name] for each in fields(Health) if each.name in page}
    return Health(**known | {"stages": stages})
