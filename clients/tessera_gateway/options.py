"""The options of the gateway but for its addresses: `tessera gateway` has them, and `tessera serve` for its gateway."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera_gateway.settings import MOST_IN_FLIGHT, Settings

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
