"""What a gateway is started with.

The options of the gateway but for its addresses: `tessera gateway` has them, and `tessera serve` for its gateway.
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tessera_wire.tensors import addresses, parse_url

MOST_IN_FLIGHT = 256
"""As many as a server on a GPU works at (language_model.max_sequences)."""
UNEVEN = 1.25
MOST_WORKERS = 8
CPUS_PER_WORKER = 4  # the servers' stages need the others
LONGEST_DRAIN_S = 3600.0


def names(text: str) -> tuple[str, ...]:
    """The value of an option that takes names with commas between."""
    found = tuple(name.strip() for name in text.split(","))
    if "" in found:
        raise argparse.ArgumentTypeError(f"{text!r} holds an empty name")
    return found


KINDS: dict[str, Any] = {"N": int, "S": float, "FILE": Path, "FOLDER": Path}
"""By metavar; the others take names."""


def option(default: Any, flag: str, metavar: str, words: str, above_0: bool = True) -> Any:
    """A field that an option sets, a number above 0 if it is one."""
    return field(default=default, metadata={"flag": flag, "metavar": metavar, "help": words, "above_0": above_0})


@dataclass(frozen=True)
class Settings:
    url: str = "localhost:8001"
    """The servers, as the SDK takes them."""
    metrics: tuple[str, ...] = ()
    """The servers' metrics pages; empty: at the port above each gRPC port, where `tessera serve` has them."""
    counters: Path | None = None
    """The file that the workers count in."""
    workers: int = option(1, "--workers", "N", "processes (default here: %(default)s)")
    model_names: tuple[str, ...] = option(
        ("vlm",), "--model-name", "NAME,...", "what requests may call the model (default: vlm)"
    )
    max_tokens: int | None = option(
        None, "--max-tokens", "N",
        "the longest answer to a request that does not say (default: what the context has room for)",
    )  # fmt: skip
    timeout_s: float = option(300.0, "--timeout", "S", "seconds for a request (%(default)s)")
    """With all its attempts."""
    max_in_flight: int | None = option(
        None, "--max-in-flight", "N", "requests at the servers at a time; others wait, and keys take turns "
        f"(default: {MOST_IN_FLIGHT} a server)",
    )  # fmt: skip
    """Of all workers."""
    max_body_mib: int = option(64, "--max-body-mib", "N", "of a request (%(default)s)")
    max_bodies_mib: int = option(512, "--max-bodies-mib", "N", "of all requests under way together (%(default)s)")
    """Over all workers."""
    max_connections_per_peer: int = option(
        512, "--max-connections-per-peer", "N", "of one address, to each worker; more for a proxy (%(default)s)"
    )
    """As many as the requests that a server takes."""
    drain_s: float = option(
        5.0, "--drain", "S", "seconds for answers under way when the gateway is told to stop (%(default)s)", False
    )
    fetch_from: tuple[str, ...] = option(
        (), "--fetch-from", "HOST,...", "fetch pictures behind http(s) URLs from these hosts (default: from none)"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "--allowed-origins", "URL,...",
        "let pages of these sites (https://app.example.com, * for any) ask (default: of none)",
    )  # fmt: skip
    """Beside the gateway's own."""
    allowed_hosts: tuple[str, ...] | None = option(
        None, "--allowed-hosts", "NAME,...", "what the gateway is called in URLs, beside addresses and localhost "
        "(default: anything; nothing else where it listens here only)",
    )  # fmt: skip
    priority_floor: int | None = option(
        None, "--priority-floor", "N", "requests may not ask for a better priority, a lower number (default: for any)",
        above_0=False,
    )  # fmt: skip
    keys: Path | None = option(  # noqa: RUF009
        None, "--keys", "FILE", "ask for one of these bearer keys (one a line)"
    )
    batch_folder: Path | None = option(  # noqa: RUF009
        None, "--batch-folder", "FOLDER", "keep files and batches in it, and serve both (default: there are none)"
    )
    batch_concurrency: int = option(64, "--batch-concurrency", "N", "requests of batches at a time (%(default)s)")
    max_file_mib: int = option(1024, "--max-file-mib", "N", "of a batch's file (%(default)s)")

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


def metrics_beside(url: str) -> str:
    """The metrics page of the server at ``url``: 8002 for gRPC at 8001 and HTTP at 8000, and so on."""
    scheme, address = parse_url(url)
    host, _, port = address.rpartition(":")
    return f"http://{host}:{int(port) + (2 if scheme.startswith('http') else 1)}/metrics"


def add_options(add: Callable[..., Any]) -> None:
    """Declares them by ``add``, an ArgumentParser's add_argument or what takes the same; each is kept under the name of
    its field."""
    for each in fields(Settings):
        if about := dict(each.metadata):
            del about["above_0"]
            default = usual_workers() if each.name == "workers" else each.default
            kind = KINDS.get(about["metavar"], names)
            add(about.pop("flag"), dest=each.name, type=kind, default=default, **about)
    add("--otel", metavar="URL", help="send traces by OTLP over HTTP to this collector, for instance "
        "http://localhost:4318 (default: $OTEL_EXPORTER_OTLP_ENDPOINT and its kin, or none)")  # fmt: skip


def usual_workers() -> int:
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // CPUS_PER_WORKER))
