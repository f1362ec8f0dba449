"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

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
