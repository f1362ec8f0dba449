"""What a gateway is started with; its workers get it as JSON.

The options of the gateway but for its addresses: `tessera gateway` has them, and `tessera serve` for its gateway.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_wire.tensors import addresses, parse_url

MOST_IN_FLIGHT = 256
"""As many as a server on a GPU works at (language_model.max_sequences)."""
UNEVEN = 1.25


@dataclass(frozen=True)
class Settings:
    url: str = "localhost:8001"
    """The servers, as the SDK takes them."""
    metrics: tuple[str, ...] = ()
    """The servers' metrics pages; empty: at the port above each gRPC port, where `tessera serve` has them."""
    model_names: tuple[str, ...] = ("vlm",)
    """What clients may call the model."""
    max_tokens: int | None = None
    """The longest answer to a request that does not say; None: as long as the context has room for."""
    drain_s: float = 5.0
    """For answers under way when the gateway is to stop."""
    timeout_s: float = 300.0
    """Of a request, with all its attempts."""
    max_in_flight: int | None = None
    """Requests at the servers at a time, of all workers; the others wait their turn. None: MOST_IN_FLIGHT a server."""
    max_body_mib: int = 64
    max_bodies_mib: int = 512
    """Of the bodies of all requests under way, over all workers."""
    max_connections_per_peer: int = 512
    """In each worker; as many requests as a server takes."""
    fetch_from: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """The sites whose pages may ask from a browser, beside the gateway's own; ``*`` is any."""
    allowed_hosts: tuple[str, ...] | None = None
    """The names that the gateway goes by, beside addresses and localhost; None: any."""
    priority_floor: int | None = None
    """The best priority (the lowest number) that a request may ask for."""
    keys: str | None = None
    """The file with the bearer keys; None: anybody may ask."""
    batch_folder: str | None = None
    """Where batches and their files are kept; None: there are none."""
    batch_concurrency: int = 64
    """Requests of batches under way at a time."""
    max_file_mib: int = 1024
    counters: str | None = None
    """The file that the workers count in."""
    workers: int = 1

    @property
    def places(self) -> int:
        """Requests that one worker may have at the servers. Connections do not spread evenly over several, which have
        some more together."""
        total = self.max_in_flight or MOST_IN_FLIGHT * len(addresses(self.url))
        return total if self.workers == 1 else math.ceil(UNEVEN * total / self.workers)

    @property
    def metrics_urls(self) -> list[str]:
        return list(self.metrics) or [metrics_beside(each) for each in addresses(self.url)]

    @property
    def bodies_bytes(self) -> int:
        """What a worker may hold of bodies: its share, and one body in any case."""
        return max(self.max_bodies_mib // self.workers, self.max_body_mib) << 20

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        given = json.loads(text).items()
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        return cls(**fields)


def metrics_beside(url: str) -> str:
    """The metrics page of the server at ``url``: 8002 for gRPC at 8001 and HTTP at 8000, and so on."""
    scheme, address = parse_url(url)
    host, _, port = address.rpartition(":")
    return f"http://{host}:{int(port) + (2 if scheme.startswith('http') else 1)}/metrics"


MOST_WORKERS = 8
CPUS_PER_WORKER = 4  # the servers' stages need the others


def add_options(add: Callable[..., Any]) -> None:
    """Declares them by ``add``, an ArgumentParser's add_argument or what takes the same."""
    default = Settings()
    add("--workers", type=int, default=usual_workers(), metavar="N", help="processes (default here: %(default)s)")
    add("--model-name", type=names, default=default.model_names, metavar="NAME,...",
        help="what requests may call the model (default: vlm)")  # fmt: skip
    add("--max-tokens", type=int, metavar="N",
        help="the longest answer to a request that does not say (default: what the context has room for)")  # fmt: skip
    add("--timeout", type=float, default=default.timeout_s, metavar="S", help="seconds for a request (%(default)s)")
    add("--max-in-flight", type=int, metavar="N", help="requests at the servers at a time; others wait, and keys take "
        f"turns (default: {MOST_IN_FLIGHT} a server)")  # fmt: skip
    add("--max-body-mib", type=int, default=default.max_body_mib, metavar="N", help="of a request (%(default)s)")
    add("--max-bodies-mib", type=int, default=default.max_bodies_mib, metavar="N",
        help="of all requests under way together (%(default)s)")  # fmt: skip
    add("--max-connections-per-peer", type=int, default=default.max_connections_per_peer, metavar="N",
        help="of one address, to each worker; more for a proxy (%(default)s)")  # fmt: skip
    add("--drain", type=float, default=default.drain_s, metavar="S",
        help="seconds for answers under way when the gateway is told to stop (%(default)s)")  # fmt: skip
    add("--fetch-from", type=names, default=(), metavar="HOST,...",
        help="fetch pictures behind http(s) URLs from these hosts (default: from none)")  # fmt: skip
    add("--allowed-origins", type=names, default=(), metavar="URL,...",
        help="let pages of these sites (https://app.example.com, * for any) ask (default: of none)")  # fmt: skip
    add("--allowed-hosts", type=names, metavar="NAME,...", help="what the gateway is called in URLs, beside "
        "addresses and localhost (default: anything; nothing else where it listens here only)")  # fmt: skip
    add("--priority-floor", type=int, metavar="N", help="requests may not ask for a better priority, a lower "
        "number (default: for any)")  # fmt: skip
    add("--keys", type=Path, metavar="FILE", help="ask for one of these bearer keys (one a line)")
    add("--batch-folder", type=Path, metavar="FOLDER",
        help="keep files and batches in it, and serve both (default: there are none)")  # fmt: skip
    add("--batch-concurrency", type=int, default=default.batch_concurrency, metavar="N",
        help="requests of batches at a time (%(default)s)")  # fmt: skip
    add("--max-file-mib", type=int, default=default.max_file_mib, metavar="N", help="of a batch's file (%(default)s)")
    add("--otel", metavar="URL", help="send traces by OTLP over HTTP to this collector, for instance "
        "http://localhost:4318 (default: $OTEL_EXPORTER_OTLP_ENDPOINT and its kin, or none)")  # fmt: skip


def usual_workers() -> int:
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // CPUS_PER_WORKER))


def names(text: str) -> tuple[str, ...]:
    """The value of an option that takes names with commas between."""
    found = tuple(name.strip() for name in text.split(","))
    if "" in found:
        raise argparse.ArgumentTypeError(f"{text!r} holds an empty name")
    return found
